"""The tables and figures of the KERPLE, DAPE and LEX papers, made from stored results."""
