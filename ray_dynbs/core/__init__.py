"""The pure part: plans, signals, policies, guards, LR rules, manager, journal. No torch, no Ray, no I/O."""
