"""What cleaning does to one document: normalization, filters of quality and language, personal data, checks of images."""
