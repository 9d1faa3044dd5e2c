"""What each layer costs: the profile, measured elsewhere or estimated here, and machines.

records, layer_records   a profile as JSON             machines        machines as JSON
segment_costs, tables    FLOPs, bytes, temporaries     estimate        times of a machine from these
contention, sharing      lanes beside each other       cache, timers   what measurements use
"""
