"""cuDNN through the graphs of nvidia-cudnn-frontend: the plan that its heuristics put first."""

import cudnn
import torch

from benchmarks.peers import saved_by_plain_torch

VERSION = f"{cudnn.backend_version_string()} (frontend {cudnn.__version__})"
LACKS = {
    "Softmax": "its graphs have no softmax",
    "functions": "has no function that a user of torch calls",
}
TYPES = {
    torch.bfloat16: cudnn.data_type.BFLOAT16,
    torch.float16: cudnn.data_type.HALF,
    torch.float32: cudnn.data_type.FLOAT,
}


class Norm:
    name = "cudnn"

    def __init__(self):
        self.handle = cudnn.create_handle()
        self.case = None

    def saved(self, case, x, weight, bias):
        return saved_by_plain_torch(case, x)

    def forward(self, case, x, weight, bias):
        given = {"x": x, "weight": weight, "bias": bias}
        made = {"y": torch.empty_like(x), "rstd": self._statistic(x)}
        if not case.rms:
            made["mean"] = self._statistic(x)
        self._run(case, self._forward_graph, given, made)
        return made["y"], made["rstd"]

    def backward(self, case, dy, saved, weight, bias):
        x, *statistics = saved
        given = {"dy": dy, "x": x, "weight": weight, "rstd": statistics[-1]}
        made = {"dx": torch.empty_like(x), "dweight": torch.empty_like(weight)}
        if not case.rms:
            given["mean"] = statistics[0]
            made["dbias"] = torch.empty_like(bias)
        self._run(case, self._backward_graph, given, made)
        return made["dx"], made["dweight"], made.get("dbias")

    def _statistic(self, x):
        return torch.empty(len(x), dtype=torch.float32, device=x.device)

    def _run(self, case, define, given, made):
        cudnn.set_stream(self.handle, torch.cuda.current_stream().cuda_stream)
        given = {name: tensor for name, tensor in given.items() if tensor is not None}
        buffers = {name: four_dimensions(case, name, t) for name, t in (given | made).items()}
        if case != self.case:
            self._build(case, define, buffers, given, made)
        pack = {self.tensors[name]: buffer for name, buffer in buffers.items()}
        pack |= self.constants
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device="cuda")
        self.graph.execute(pack, workspace, handle=self.handle)

    def _build(self, case, define, buffers, given, made):
        self.case = None
        float32 = cudnn.data_type.FLOAT
        self.graph = cudnn.pygraph(
            handle=self.handle, intermediate_data_type=float32, compute_data_type=float32
        )
        self.tensors, self.constants = {}, {}
        for name in given:
            buffer = buffers[name]
            self.tensors[name] = self.graph.tensor(
                name=name, dim=list(buffer.shape), stride=list(buffer.stride()),
                data_type=TYPES[buffer.dtype],
            )  # fmt: skip
        self.tensors |= define(case, self.tensors)
        for name in made:
            output = self.tensors[name].set_output(True)
            output.set_data_type(TYPES[buffers[name].dtype])
        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.workspace = self.graph.get_workspace_size()
        self.case = case

    def _forward_graph(self, case, tensors):
        epsilon = self.graph.tensor(
            name="epsilon", dim=[1, 1, 1, 1], stride=[1, 1, 1, 1], is_pass_by_value=True,
            data_type=cudnn.data_type.FLOAT,
        )  # fmt: skip
        self.constants = {epsilon: torch.full((1, 1, 1, 1), case.eps)}
        arguments = dict(
            norm_forward_phase=cudnn.norm_forward_phase.TRAINING,
            input=tensors["x"],
            scale=tensors["weight"],
            epsilon=epsilon,
        )
        if case.rms:
            y, rstd = self.graph.rmsnorm(**arguments)
            return {"y": y, "rstd": rstd}
        y, mean, rstd = self.graph.layernorm(bias=tensors["bias"], **arguments)
        return {"y": y, "mean": mean, "rstd": rstd}

    def _backward_graph(self, case, tensors):
        arguments = dict(
            grad=tensors["dy"],
            input=tensors["x"],
            scale=tensors["weight"],
            inv_variance=tensors["rstd"],
        )
        if case.rms:
            dx, dweight, *_ = self.graph.rmsnorm_backward(has_dbias=False, **arguments)
            return {"dx": dx, "dweight": dweight}
        dx, dweight, dbias = self.graph.layernorm_backward(mean=tensors["mean"], **arguments)
        return {"dx": dx, "dweight": dweight, "dbias": dbias}


def four_dimensions(case, name, tensor):
    """As cuDNN sees it: rows are the batch, columns the channels, which come last in memory."""
    rows = case.rows if name in ("x", "y", "dy", "dx", "mean", "rstd") else 1
    cols = 1 if name in ("mean", "rstd") else case.cols
    return tensor.as_strided((rows, cols, 1, 1), (cols, 1, cols, cols))
