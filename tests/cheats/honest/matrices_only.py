"""Right for any number of dimensions."""


def quick_gelu(x):
    wide = x.reshape(-1).double() if x.dtype.itemsize == 8 else x.reshape(-1).float()
    return (wide * (1.702 * wide).sigmoid()).view(x.shape).to(x.dtype)
