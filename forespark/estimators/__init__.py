"""Pre-draft and post-draft acceptance estimators."""
