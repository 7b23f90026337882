"""The sections of the configuration: every supported key is declared once, as a field of a section."""
