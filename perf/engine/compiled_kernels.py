"""Launches of triton kernels, compiled for GPUs that are not here. Needs triton, but no GPU."""

import torch

NAMES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Launch:
    """Stands for a kernel and takes down how it is launched."""

    def __init__(self, kernel: object) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

    def __getitem__(self, grid: object) -> object:
        return lambda *args, **options: self.calls.append((args, options))

    def compiled(self, capability: int) -> list[object]:
        """Each launch, compiled as it would be there."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        found = []
        for args, options in self.calls:
            names = self.kernel.arg_names  # type: ignore[attr-defined]
            constants = {n: v for n, v in options.items() if n in names}
            signature = {name: "constexpr" for name in constants}
            # What triton finds out about the arguments of a launch.
            even = {i for i, value in enumerate(args) if isinstance(value, int) and value % 16 == 0}
            for name, value in zip(names, args, strict=False):
                if isinstance(value, torch.Tensor):
                    kind = NAMES[value.dtype]
                else:
                    kind = "fp32" if isinstance(value, float) else "i32"
                signature[name] = kind
            source = ASTSource(
                fn=self.kernel,
                signature={name: signature[name] for name in names},
                constexprs=constants,
                attrs={
                    (i,): [["tt.divisibility", 16]]
                    for i, name in enumerate(names)
                    if signature[name].startswith("*") or i in even
                },
            )
            tuned = {n: v for n, v in options.items() if n not in names}
            target = GPUTarget("cuda", capability, 32)
            found.append(triton.compile(source, target=target, options=tuned))
        return found
