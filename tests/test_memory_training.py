"""memory_efficient over many steps: on a GPU a call knows from the steps before how many columns to
list, without waiting. Gradients stay right whatever happens to the parameters, or are NaN and
followed by an error."""

import copy
import io
import threading

import pytest
import torch
from harness import (
    SHORT,
    Verdict,
    each_kind,
    held_for_backward,
    randn,
    random_input,
    returns_at_once,
    waits_are_errors,
)
from reference import NormCheck

import fused_norm as fn
from fused_norm import functional

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NO_ROOM = "had no room for"


def make(kind, cols, device, dtype=FP32, memory_efficient=True, **options):
    norm = fn.LayerNorm if kind == "layer" else fn.RMSNorm
    return norm(cols, device=device, dtype=dtype, memory_efficient=memory_efficient, **options)


def gradients(module, x, dy):
    """(y, gradients of the input and the parameters)."""
    module.zero_grad()
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    y.backward(dy)
    return y.detach(), [leaf.grad, *(p.grad for p in module.parameters())]


def ratios(module, x, dy):
    """One call of a module, held to the fp64 reference."""
    y, grads = gradients(module, x, dy)
    check = NormCheck(
        rows=len(x),
        rms=isinstance(module, fn.RMSNorm),
        eps=torch.finfo(FP32).eps if module.eps is None else module.eps,
        x_dtype=x.dtype,
        y_dtype=y.dtype,
        weight=module.weight,
        bias=getattr(module, "bias", None),
        from_output=True,
    )
    check.rows(x, y, dy, grads[0])
    check.parameters(*grads[1:])
    return check.ratios()


def assert_follows(efficient, plain, generator, dtype=FP64, label=""):
    """The flag changes no gradient."""
    device, cols = generator.device, efficient.normalized_shape[0]
    plain.load_state_dict(efficient.state_dict())
    assert plain.weight.device.type == device.type
    x, dy = randn(generator, 10, cols, dtype=dtype), randn(generator, 10, cols, dtype=dtype)
    ours, expected = (gradients(module, x, dy)[1] for module in (efficient, plain))
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other, msg=lambda m: f"{label}: {m}")


def train(module, optimizer, generator, steps):
    cols = module.normalized_shape[0]
    for _ in range(steps):
        x = randn(generator, 10, cols, dtype=module.weight.dtype)
        gradients(module, x, randn(generator, 10, cols, dtype=module.weight.dtype))
        optimizer.step()


def zero_some(weight):
    with torch.no_grad():
        weight[::7] = 0


def load_zeros(module):
    state = {name: value.clone() for name, value in module.state_dict().items()}
    state["weight"][3:9] = 0
    module.load_state_dict(state)


def assign_zeros(module):
    state = {name: value.clone() for name, value in module.state_dict().items()}
    state["weight"][3:9] = 0
    module.load_state_dict(state, assign=True)


def move(module):
    """To the CPU and back."""
    device = module.weight.device
    zero_some(module.cpu().weight)
    module.to(device)


EVENTS = {
    "zeroed in place": lambda m: zero_some(m.weight),
    "all zeroed": lambda m: torch.nn.init.zeros_(m.weight),
    "load_state_dict": load_zeros,
    "load_state_dict, assigned": assign_zeros,
    "new data": lambda m: setattr(m.weight, "data", torch.zeros_like(m.weight)),
    "a new parameter": lambda m: setattr(
        m, "weight", torch.nn.Parameter(torch.zeros_like(m.weight))
    ),
    "half precision and back": lambda m: (zero_some(m.weight), m.half(), m.double()),
    "moved between devices": move,
    "nothing": lambda m: None,
}


@pytest.mark.parametrize("event", EVENTS)
@each_kind
def test_events_between_steps(kind, event, device, generator):
    """The first call after an event is right already."""
    efficient, plain = (make(kind, 48, device, FP64, flag) for flag in (True, False))
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        train(efficient, optimizer(efficient.parameters(), lr=1e-3), generator, 5)
        assert_follows(efficient, plain, generator, label="before")
        EVENTS[event](efficient)
        for step in range(3):
            assert_follows(efficient, plain, generator, label=f"{event}, {step} steps later")
        torch.nn.init.ones_(efficient.weight)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=3e-3),
    "one that writes through .data": lambda p: DataWriter(p, 3e-3),
}


class DataWriter(torch.optim.Optimizer):
    """Steps of one size, which no version counter sees."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(group["lr"] * p.grad.sign())


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@each_kind
def test_weights_that_cross_zero(kind, optimizer, dtype, device, generator):
    """Many a step, and biases that grow beside them. Every step is right."""
    module = make(kind, 96, device, dtype)
    with torch.no_grad():
        module.weight.copy_(0.02 * randn(generator, 96))
    step_once = OPTIMIZERS[optimizer](module.parameters())
    verdict = Verdict()
    for step in range(40):
        x, dy = random_input(generator, 30, 96, dtype), randn(generator, 30, 96, dtype=dtype)
        verdict.add(f"{SHORT[dtype]}, step {step}", ratios(module, x, dy))
        step_once.step()
    verdict.check()


@pytest.mark.parametrize("start", ["zeros", "ones", "some zeros", "1e-3"])
@each_kind
def test_training_equals_training_without_the_flag(kind, start, device, generator):
    results = []
    for flag in (False, True):
        state = torch.Generator(device).manual_seed(3)
        module = make(kind, 64, device, FP64, flag)
        with torch.no_grad():
            module.weight.fill_({"zeros": 0.0, "1e-3": 1e-3}.get(start, 1.0))
            if start == "some zeros":
                module.weight[::9] = 0
        train(module, torch.optim.AdamW(module.parameters(), lr=1e-3), state, 40)
        results.append([p.detach() for p in module.parameters()])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def same_after(run, efficient, plain, generator, label):
    """The gradients that ``run(module, x, dy)`` leaves are the same with the flag and without."""
    plain.load_state_dict(efficient.state_dict())
    x, dy = randn(generator, 10, 48, dtype=FP64), randn(generator, 10, 48, dtype=FP64)
    grads = []
    for module in (efficient, plain):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        run(module, leaf, dy)
        grads.append([leaf.grad, *(p.grad for p in module.parameters())])
    for ours, expected in zip(*grads, strict=True):
        torch.testing.assert_close(ours, expected, msg=label)


def checkpointed(module, x, reentrant=False):
    return torch.utils.checkpoint.checkpoint(lambda t: module(t).sin(), x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("data", [False, True], ids=["", "writes through .data"])
@each_kind
def test_checkpointed_training(kind, data, reentrant, device, generator):
    """The second forward pass saves what the first did."""
    efficient, plain = (make(kind, 48, device, FP64, flag) for flag in (True, False))
    zero_some(efficient.weight)
    parameters = list(efficient.parameters())
    optimizer = DataWriter(parameters, 1e-2) if data else torch.optim.SGD(parameters, lr=1e-2)

    def run(module, x, dy):
        for _ in range(2):  # two micro-batches
            checkpointed(module, x, reentrant).backward(dy)

    for step in range(12):
        same_after(run, efficient, plain, generator, f"step {step}")
        optimizer.step()


@each_kind
def test_checkpoints_of_parameters_that_change_their_memory(kind, device, generator):
    """As FSDP gathers them for each forward pass, and anew for its repetition in backward."""
    efficient, plain = (make(kind, 48, device, FP64, flag) for flag in (True, False))
    zero_some(efficient.weight)
    with torch.no_grad():
        efficient.weight[1::7] = 0.01  # will cross zero
    optimizer = torch.optim.SGD(efficient.parameters(), lr=1e-2)

    def run(module, x, dy):
        before, outputs = [], []

        def gather():
            for p in module.parameters():
                before.append(p.data)  # which keeps its memory from being used again
                p.data = p.data.clone()

        for _ in range(2):  # two micro-batches at once
            gather()
            outputs.append(checkpointed(module, x))
        for y in outputs:
            gather()
            y.backward(dy)

    for step in range(12):
        same_after(run, efficient, plain, generator, f"step {step}")
        optimizer.step()


@each_kind
def test_several_forwards_and_shared_weights(kind, device, generator):
    """Two modules with one weight, each called twice before one backward pass; evaluation between
    the steps."""
    first, second = (make(kind, 48, device, FP64) for _ in range(2))
    second.weight = first.weight
    plain_first, plain_second = (make(kind, 48, device, FP64, False) for _ in range(2))
    plain_second.weight = plain_first.weight
    ours, theirs = (torch.nn.ModuleList(m) for m in ((first, second), (plain_first, plain_second)))
    with torch.no_grad():
        first.weight[::7] = 0
        if kind == "layer":
            second.bias.fill_(1e17)  # all columns lost
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-2)
    for step in range(6):
        theirs.load_state_dict(ours.state_dict())
        x = randn(generator, 10, 48, dtype=FP64)
        with torch.no_grad():
            ours[0](x)
        grads = []
        for modules in (ours, theirs):
            modules.zero_grad()
            leaf = x.clone().requires_grad_()
            sum(m(leaf).sin().sum() for m in (*modules, *modules)).backward()
            grads.append([leaf.grad, *(p.grad.clone() for p in modules.parameters())])
        for mine, other in zip(*grads, strict=True):
            torch.testing.assert_close(mine, other, msg=f"step {step}")
        optimizer.step()


@each_kind
def test_gradient_accumulation(kind, device, generator):
    efficient, plain = (make(kind, 48, device, FP64, flag) for flag in (True, False))
    zero_some(efficient.weight)
    optimizer = torch.optim.SGD(efficient.parameters(), lr=1e-2)
    for _ in range(5):
        plain.load_state_dict(efficient.state_dict())
        efficient.zero_grad(), plain.zero_grad()
        for _ in range(3):
            x, dy = randn(generator, 10, 48, dtype=FP64), randn(generator, 10, 48, dtype=FP64)
            for module in (efficient, plain):
                module(x).backward(dy)
        for ours, theirs in zip(efficient.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        optimizer.step()


@pytest.mark.parametrize("swap", ["views of a flat parameter", "freed storage"])
def test_storage_swaps(swap, device, generator):
    """What FSDP does: parameters are views that are made anew at each step, or their storage is
    freed after use and filled again, somewhere else. On a GPU all of so few steps look."""
    cols = 48
    flat = torch.nn.Parameter(torch.ones(2 * cols, dtype=FP64, device=device))
    keep = []  # so that storage is not given out again at once
    weight = torch.nn.Parameter(torch.ones(cols, dtype=FP64, device=device))
    for step in range(8):
        values = torch.ones(2 * cols, dtype=FP64, device=device)
        values[:cols:3] = 1 - step / 4  # zero at step 4
        if swap == "freed storage":
            storage = weight.untyped_storage()
            size = storage.nbytes()
            storage.resize_(0)
            keep.append(torch.empty(cols, dtype=FP64, device=device))
            storage.resize_(size)
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
                weight.copy_(values[:cols])
            params = [weight, None]
        else:
            flat.data = values.clone()
            params = list(flat.split(cols))
            params[1] = params[1] * 0 if step == 0 else params[1]
        grads = []
        x, dy = randn(generator, 10, cols, dtype=FP64), randn(generator, 10, cols, dtype=FP64)
        for flag in (True, False):
            leaf = x.clone().requires_grad_()
            flat.grad = weight.grad = None
            y = functional.layer_norm(leaf, [cols], *params, memory_efficient=flag)
            y.backward(dy, retain_graph=True)
            source = weight if swap == "freed storage" else flat
            grads.append((leaf.grad, source.grad))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs, msg=f"step {step}")


def test_many_norms_of_one_flat_parameter(device, generator):
    """As FSDP has them: each saves its output, however many they are."""
    norms, rows, cols = 40, 16, 48
    flat = torch.nn.Parameter(torch.ones(norms * cols, device=device))
    x = randn(generator, rows, cols).requires_grad_()
    for weight in flat.split(cols):
        y, size = held_for_backward(
            lambda w=weight: functional.rms_norm(x, [cols], w, memory_efficient=True), x, flat
        )
        y.sum().backward()
        assert size == y.nbytes + rows * 4  # rstd, and not the input


def test_computed_weights(device, generator):
    """A weight that is computed anew at each call is nobody's to remember."""
    base = torch.nn.Parameter(torch.zeros(48, dtype=FP64, device=device))
    for step in range(5):
        with torch.no_grad():
            base.fill_(step - 2.0)
        grads = []
        x = randn(generator, 10, 48, dtype=FP64)
        for flag in (True, False):
            leaf = x.clone().requires_grad_()
            base.grad = None
            functional.rms_norm(leaf, [48], 2 * base, memory_efficient=flag).sin().sum().backward()
            grads.append((leaf.grad, base.grad))
        for ours, theirs in zip(*grads, strict=True):
            torch.testing.assert_close(ours, theirs)


@each_kind
def test_what_is_known_stays_with_the_parameter(kind, device, generator):
    """Copies, files and swaps of parameters work as if nothing were known of them."""
    module = make(kind, 48, device, FP64)
    plain = make(kind, 48, device, FP64, False)
    train(module, torch.optim.SGD(module.parameters(), lr=1e-3), generator, 4)
    twin = copy.deepcopy(module)
    zero_some(twin.weight)
    assert_follows(twin, plain, generator)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    zero_some(loaded.weight)
    assert_follows(loaded, plain, generator)
    file = io.BytesIO()
    torch.save(dict(module.named_parameters()), file)
    file.seek(0)
    torch.load(file, weights_only=True)
    torch.utils.swap_tensors(module.weight, torch.nn.Parameter(torch.zeros_like(module.weight)))
    assert_follows(module, plain, generator)


@each_kind
def test_threads(kind, device, seed):
    """Each thread trains a module of its own, and one that all share."""
    shared = make(kind, 48, device, FP64)
    failures = []

    def work(number):
        try:
            generator = torch.Generator(device).manual_seed(seed + number)
            own, plain = (make(kind, 48, device, FP64, flag) for flag in (True, False))
            zero_some(own.weight)
            optimizer = torch.optim.SGD(own.parameters(), lr=1e-2)
            for _ in range(15):
                assert_follows(own, plain, generator)
                optimizer.step()
                x = randn(generator, 10, 48, dtype=FP64).requires_grad_()
                mine = torch.autograd.grad(shared(x).sin().sum(), x)[0]
                with torch.no_grad():
                    plain.weight.fill_(1)
                other = torch.autograd.grad(
                    torch.nn.functional.layer_norm(x, [48]).sin().sum()
                    if kind == "layer"
                    else torch.nn.functional.rms_norm(x, [48]).sin().sum(),
                    x,
                )[0]
                torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.cuda
@each_kind
def test_two_streams_by_turns(kind, seed):
    """What looks remember is of one stream, what they report is not."""
    generator = torch.Generator("cuda").manual_seed(seed)
    efficient, plain = (make(kind, 264, "cuda", FP64, flag) for flag in (True, False))
    zero_some(efficient.weight)
    optimizer = torch.optim.SGD(efficient.parameters(), lr=1e-3)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for step in range(8):
        stream = streams[step % 2]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert_follows(efficient, plain, generator, label=f"step {step}")
            optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.cuda
@each_kind
def test_the_error_waits_for_no_other_stream(kind, seed):
    """Which may wait for what this thread is to launch next."""
    generator = torch.Generator("cuda").manual_seed(seed)
    module = make(kind, 264, "cuda")
    train(module, torch.optim.Adam(module.parameters(), lr=1e-3), generator, 5)
    x, dy = randn(generator, 50, 264), randn(generator, 50, 264)
    module.weight.data[10:40] = 0
    overflows(module, x, dy, slice(10, 40))
    busy, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(4_000_000_000)
        done.record()
    with pytest.raises(RuntimeError, match=NO_ROOM):
        module(x)
    assert not done.query()
    torch.cuda.synchronize()


@pytest.mark.multi_gpu
@each_kind
def test_the_error_names_norms_of_every_device(kind, seed):
    """Also those whose kernels still run, on another device than the current one."""
    generator = torch.Generator("cuda:1").manual_seed(seed)
    first, second = (make(kind, 264, "cuda:1") for _ in range(2))
    x = randn(generator, 50, 264)
    for module in (first, second):
        train(module, torch.optim.Adam(module.parameters(), lr=1e-3), generator, 5)
        module.weight.data[10:40] = 0
    outputs = [module(x.clone().requires_grad_()) for module in (first, second)]
    outputs[0].backward(x)
    torch.cuda.synchronize("cuda:1")  # this one has signalled
    with torch.cuda.device(1):
        torch.cuda._sleep(500_000_000)
    outputs[1].backward(x)
    with torch.cuda.device(0), pytest.raises(RuntimeError, match=NO_ROOM) as raised:
        make(kind, 264, "cuda:0")(torch.ones(2, 264, device="cuda:0"))
    assert str(raised.value).count(NO_ROOM) == 2


@pytest.mark.cuda
@each_kind
def test_norms_freed_beside_another_threads_steps(kind, seed):
    """A step looks at the parameters of all norms that are known."""
    generator = torch.Generator("cuda").manual_seed(seed)
    module = make(kind, 48, "cuda")
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    train(module, optimizer, generator, 1)
    stop, failures = threading.Event(), []

    def make_and_free():
        try:
            x = torch.ones(4, 48, device="cuda")
            while not stop.is_set():
                for norm in [make(kind, 48, "cuda") for _ in range(8)]:
                    norm(x).sum().backward()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=make_and_free) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        optimizer.step()
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@each_kind
def test_eight_zeros_of_4096_keep_the_saving(kind, dtype, device, generator):
    """Norm and linear layer: the linear layer keeps the norm's output anyway."""
    rows, cols = 256, 4096
    linear = torch.nn.Linear(cols, 8, device=device, dtype=dtype)
    held = {}
    for name, flag, zeros in (("off", False, 0), ("on", True, 0), ("with zeros", True, 8)):
        module = make(kind, cols, device, dtype, flag)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        with torch.no_grad():
            module.weight[5 : 5 + zeros] = 0
        x = randn(generator, rows, cols, dtype=dtype).requires_grad_()
        for step in range(4):
            y, held[name] = held_for_backward(lambda x=x, m=module: linear(m(x)))
            y.square().sum().backward()
            for p in module.parameters():
                p.grad[5 : 5 + zeros] = 0
            optimizer.step()
            assert held["off"] - held[name] >= (0.99 if flag else 0) * (
                held["off"] - held.get("on", 0)
            ), step
    assert held["off"] - held["on"] == rows * (
        cols * dtype.itemsize + (4 if kind == "layer" else 0)
    )
    verdict = Verdict()
    x, dy = random_input(generator, rows, cols, dtype), randn(generator, rows, cols, dtype=dtype)
    verdict.add("gradients", ratios(module, x, dy))
    verdict.check()


def overflows(module, x, dy, columns):
    """Gradients that need these columns are NaN, and the next call says so."""
    grads = gradients(module, x, dy)[1]
    assert grads[0].isnan().all()
    for grad in grads[1:]:
        assert grad[columns].isnan().all()
    torch.cuda.synchronize() if x.is_cuda else None


@pytest.mark.cuda
@pytest.mark.parametrize("cols", [264, 2048, 12288, 140000])  # in each tier, and few rows
@each_kind
def test_columns_beyond_the_room_are_an_error(kind, cols, seed):
    """Weights written behind every version counter's back, in the middle of training."""
    generator = torch.Generator("cuda").manual_seed(seed)
    model = torch.nn.ModuleDict({"block": torch.nn.ModuleList([make(kind, cols, "cuda")])})
    module = model["block"][0]
    plain = make(kind, cols, "cuda", memory_efficient=False)
    train(module, torch.optim.Adam(module.parameters(), lr=1e-3), generator, 5)
    x, dy = randn(generator, 50, cols), randn(generator, 50, cols)
    module.weight.data[10:40] = 0
    overflows(module, x, dy, slice(10, 40))
    with pytest.raises(RuntimeError, match=rf"block\.0 = .*{NO_ROOM} 30 column"):
        gradients(module, x, dy)
    for _ in range(3):
        assert_follows(module, plain, generator, dtype=FP32)


@each_kind
def test_compiled_room(kind, device, generator):
    """A compiled call lists columns that become lost after it was compiled."""
    torch._dynamo.reset()
    efficient, plain = (make(kind, 264, device, FP64, flag) for flag in (True, False))
    compiled = torch.compile(efficient, backend="aot_eager", fullgraph=True)
    for zeros in (0, 1, 16, 0):
        with torch.no_grad():
            efficient.weight.fill_(1)[:zeros] = 0
        plain.load_state_dict(efficient.state_dict())
        x, dy = randn(generator, 50, 264, dtype=FP64), randn(generator, 50, 264, dtype=FP64)
        ours, theirs = (gradients(call, x, dy)[1] for call in (compiled, plain))
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other)


def captured_step(module, x, dy, warm_up=1):
    """(graph, gradients that its replay writes)."""

    def step():
        return torch.autograd.grad(module(x), [x, *module.parameters()], dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    return graph, grads


@pytest.mark.cuda
@each_kind
def test_captured_room(kind, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    module = make(kind, 264, "cuda")
    x, dy = randn(generator, 50, 264).requires_grad_(), randn(generator, 50, 264)
    graph, captured = captured_step(module, x, dy)
    for zeros in (0, 1, 16):
        module.weight.data[:zeros] = 0
        graph.replay()
        expected = torch.autograd.grad(
            torch.nn.functional.layer_norm(x, [264], module.weight, module.bias)
            if kind == "layer"
            else torch.nn.functional.rms_norm(x, [264], module.weight),
            [x, *module.parameters()],
            dy,
        )
        for ours, theirs in zip(captured, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    module.weight.data[16] = 0
    graph.replay()
    assert captured[0].isnan().all() and captured[1][16].isnan()
    with pytest.raises(RuntimeError, match=f"{NO_ROOM} 1 column"):
        module(x)
    module.weight.data[16] = 1
    graph.replay()
    assert not captured[0].isnan().any()
    del graph, module, captured
    make(kind, 264, "cuda")(x).sum().backward()


@pytest.mark.cuda
@pytest.mark.parametrize("known", [False, True], ids=["", "known to be lost"])
@each_kind
def test_captured_with_the_input_saved(kind, known, seed):
    """Where nothing is known, or most columns are known to be lost, any weights are right."""
    generator = torch.Generator("cuda").manual_seed(seed)
    module = make(kind, 264, "cuda")
    if known:
        torch.nn.init.zeros_(module.weight)
    x, dy = randn(generator, 50, 264).requires_grad_(), randn(generator, 50, 264)
    make(kind, 264, "cuda", memory_efficient=False)(x).backward(dy)  # loads the kernels
    graph, captured = captured_step(module, x, dy, warm_up=int(known))
    for weight in (0.0, 1.0):
        module.weight.data[::3] = weight
        graph.replay()
        expected = torch.autograd.grad(
            torch.nn.functional.layer_norm(x, [264], module.weight, module.bias)
            if kind == "layer"
            else torch.nn.functional.rms_norm(x, [264], module.weight),
            [x, *module.parameters()],
            dy,
        )
        for ours, theirs in zip(captured, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


STARTS = {
    "ones": lambda w: w.fill_(1),
    "zeros": lambda w: w.fill_(0),
    "8 zeros": lambda w: w.fill_(1)[3:11].fill_(0),
}


# Fused optimizers move no version counter.
STEPPING = {
    "": lambda p: torch.optim.AdamW(p, lr=1e-4),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
    "no optimizer": lambda p: None,
}
WARM_UP = 2


@pytest.mark.cuda
@pytest.mark.parametrize("stepping", STEPPING)
@pytest.mark.parametrize("start", STARTS)
@each_kind
def test_no_wait_from_the_third_step_on(kind, start, stepping, seed):
    """And the memory stays saved, also where a wait would be an error: a call that must not look
    saves its input, and would pass for one that need not."""
    generator = torch.Generator("cuda").manual_seed(seed)
    layers = []
    for _ in range(3):  # each activation function keeps its input, the norm's output
        layers += [make(kind, 4096, "cuda", BF16), torch.nn.GELU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(4096, 16, device="cuda", dtype=BF16))
    with torch.no_grad():
        for module in layers[::2]:
            STARTS[start](module.weight)
    optimizer = STEPPING[stepping](model.parameters())
    x = randn(generator, 256, 4096, dtype=BF16)
    held = []

    def step():
        loss, size = held_for_backward(lambda: model(x).square().mean())
        held.append(size)
        model.zero_grad()
        loss.backward()
        if optimizer:
            optimizer.step()

    def steps(count=4):
        for _ in range(count):
            step()

    # With all columns and with none at risk: so that no step is the first to run a kernel.
    for weight in (0.0, 1.0):
        module = make(kind, 4096, "cuda", BF16)
        torch.nn.init.constant_(module.weight, weight)
        gradients(module, x, x)
    steps(WARM_UP)
    # So that no step has to take memory from the driver.
    spare = [torch.empty_like(x) for _ in range(32)] + [x.new_empty(2**18) for _ in range(32)]
    del spare
    torch.cuda.synchronize()
    assert returns_at_once(steps)
    torch.cuda.synchronize()
    with waits_are_errors():
        steps()
        assert returns_at_once(steps)
    # The norms' outputs and the linear layer's input; or the norms' inputs too. Parameters,
    # statistics and lists are less than an activation.
    kept = {size // x.nbytes for size in held[WARM_UP:]}
    assert kept == {7 if start == "zeros" else 4}
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "of_backward"),
    [
        (256, 4096, BF16, 1),
        (1024, 4096, BF16, 2),
        (20, 65536, FP32, 2),
        (20, 98304, BF16, 2),
        (3, 300000, FP32, 3),
    ],
    ids=["few rows", "", "cluster, fp32", "cluster, bf16", "streamed"],
)
@each_kind
def test_no_more_launches_while_nothing_is_listed(kind, rows, cols, dtype, of_backward, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    ours, others = {}, {}
    for name, flag, zeros in (("off", False, 0), ("on", True, 0), ("with zeros", True, 8)):
        module = make(kind, cols, "cuda", dtype, flag)
        with torch.no_grad():
            module.weight[:zeros] = 0
        x, dy = (randn(generator, rows, cols, dtype=dtype) for _ in range(2))
        for _ in range(3):
            gradients(module, x, dy)
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            gradients(module, x, dy)
            torch.cuda.synchronize()
        # Kernels, and what else occupies the GPU: copies and fills.
        launched = sorted(
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        )
        ours[name] = [kernel for kernel in launched if "fused_norm" in kernel]
        others[name] = [kernel for kernel in launched if "fused_norm" not in kernel]
    assert len(ours["off"]) == 1 + of_backward, ours
    assert len(ours["on"]) == 1 + of_backward, ours
    assert len(ours["with zeros"]) == 2 + of_backward, ours  # one makes the list
    assert others["off"] == others["on"] == others["with zeros"]
