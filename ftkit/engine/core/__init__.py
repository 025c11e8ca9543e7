"""Units and flat parameters: how a block's weights are gathered, used and freed, and its gradient reduced."""
