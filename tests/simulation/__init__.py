"""The real core and the real session rules under virtual time: clusters through more failures than operators meet."""
