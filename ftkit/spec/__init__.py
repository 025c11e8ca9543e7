"""Definitions that plan and engine share: strategy, layout of flat parameters, tiers, update rules. Without torch."""
