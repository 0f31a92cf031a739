"""The functions of other attention packages under their own names and signatures, computed by octet:

from octet.compat.flash_attn import flash_attn_func
from octet.compat.sageattention import sageattn
"""
