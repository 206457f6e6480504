"""A folder of this machine, copied to an object store while it is being written.

Only additions and changes travel; what is deleted here stays there.
"""
