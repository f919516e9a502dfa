"""A quantised base beside a bf16 one."""
