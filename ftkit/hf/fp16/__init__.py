"""fp16: overflow is found, and the modules where it occurs compute in fp32."""
