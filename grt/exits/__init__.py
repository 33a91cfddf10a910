"""Early exit: policies, the loop for tokens that leave it, thresholds that were found."""
