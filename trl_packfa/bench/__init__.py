"""`trl-packfa bench`: measure packed and padded training side by side on this machine."""
