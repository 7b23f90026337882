"""Sweeps: experiments of many runs that one file defines. Only missing trainings and evaluations
are run.
"""
