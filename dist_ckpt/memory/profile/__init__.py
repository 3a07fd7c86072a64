"""The deep step: one update, allocation by allocation.

``recording.py`` looks on, ``allocations.py`` follows each one from birth to end, ``lifetimes.py`` finds the ends that
nobody has recorded, ``attribution.py`` says whose each is,
``phases.py`` what runs meanwhile, ``timeline.py`` adds up, and ``step_profile.py`` is what comes out.
"""
