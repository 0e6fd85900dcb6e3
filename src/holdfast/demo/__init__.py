"""``holdfast demo``: train a classifier at several bit widths, twice each, deploy it, compare the bits."""
