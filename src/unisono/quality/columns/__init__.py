"""Columns of tables: schemas, outliers, stuck values and gaps, and a copy in which they are masked or of one schema."""
