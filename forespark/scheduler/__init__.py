"""The scheduler: rewards, concave envelopes and the joint choice of draft and verify budgets."""
