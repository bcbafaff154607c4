"""Training of the drafter and both estimators with speculators."""
