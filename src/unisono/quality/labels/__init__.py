"""Labels that are likely wrong: conflicts, suspects, the page that marks them, and data sets with new labels."""
