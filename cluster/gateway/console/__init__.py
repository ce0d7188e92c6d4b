"""The web console of a gateway: what the cluster does now, where requests are, and why each went where it went."""
