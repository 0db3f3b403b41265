"""The link to the host: its rates, which records slices of host memory are, and what they cost
beside products.
"""
