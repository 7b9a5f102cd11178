"""Kill the daemon at any moment: what was acknowledged is there after the next mount.

`mounting` starts, kills and unmounts daemons, `killer` is a daemon that ends before its N-th call;
`tests.churn` keeps it busy and knows what has to be there.
"""
