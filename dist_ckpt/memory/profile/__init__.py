"""The deep step: one update, allocation by allocation.

``recording.py`` looks on, ``allocations.py`` follows each one from birth to end, ``attribution.py`` says whose it is,
``phases.py`` what runs meanwhile, ``timeline.py`` adds up, and ``step_profile.py`` is what comes out.
"""
