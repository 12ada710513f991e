"""Text augmentation and masking."""
