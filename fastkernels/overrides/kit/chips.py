"""Names of chips, as torch.cuda.get_device_name gives them, on which targets were measured in compiled code."""

H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"
