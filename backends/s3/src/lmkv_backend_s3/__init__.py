"""S3 and compatible object stores as an lmkv tier: one object per frame, shared by all who use the bucket."""
