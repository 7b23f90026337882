"""Tables, figures and reports from stored evaluation results, in the layout of the KERPLE, DAPE and
LEX papers.
"""
