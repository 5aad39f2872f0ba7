// The backward ladder: LayerNorm's backward pass in fp32, from a thread a row to this library's
// own, each step checked against the CPU and timed. `backward_ladder --help` says how to run it.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "core/common/device.h"
#include "core/norm/norm.h"
#include "reference.h"
#include "steps.cuh"

namespace backward_ladder {
namespace {

constexpr char kUsage[] =
    "usage: backward_ladder [--csv FILE] [ROWSxCOLS ...]\n"
    "Times five ways to write LayerNorm's backward pass in fp32, and this library's, on the "
    "current\n"
    "CUDA device. Sizes: by default 1024x2048, 16384x2048 and 8192x4096; at most 4096 columns.\n"
    "Exit code: 0, 1 if a result is wrong or CUDA fails, 2 if it cannot run.\n";

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "backward_ladder: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) check(call, #call)

// The last step: this library.

fused_norm::NormBackwardParams library_params(const Backward& b, void* workspace) {
  using fused_norm::DType;
  fused_norm::NormBackwardParams params{};
  params.rows = b.rows;
  params.cols = b.cols;
  params.x_dtype = params.y_dtype = DType::kFloat32;
  params.dy = b.dy;
  params.saved = b.x;
  params.dy_layout = params.saved_layout = fused_norm::one_stride(b.cols);
  params.mean = b.mean;
  params.rstd = b.rstd;
  params.weight = {b.weight, DType::kFloat32};
  params.bias = {nullptr, DType::kFloat32};  // of which only the gradient's dtype is needed
  params.dx = b.dx;
  params.dweight = b.dweight;
  params.dbias = b.dbias;
  params.workspace = workspace;
  return params;
}

class Library {
 public:
  explicit Library(const Backward& sizes) {
    int device = 0;
    CHECK(cudaGetDevice(&device));
    CHECK(fused_norm::query_device(device, &properties_));
    CHECK(cudaMalloc(&workspace_, fused_norm::norm_backward_workspace(
                                      library_params(sizes, nullptr), properties_)));
  }
  ~Library() { cudaFree(workspace_); }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  cudaError_t launch(const Backward& b, cudaStream_t stream) const {
    return fused_norm::launch_norm_backward(library_params(b, workspace_), properties_, stream);
  }

 private:
  fused_norm::DeviceProperties properties_{};
  void* workspace_ = nullptr;
};

// Memory: sets of buffers with the same contents, so that launches can leave the cache behind.

class Buffers {
 public:
  Buffers(const Problem<float>& problem, int count) : sets_(count) {
    const size_t size = problem.x.size();
    const float* const mean = filled(problem.mean);
    const float* const rstd = filled(problem.rstd);
    const float* const weight = filled(problem.weight);
    for (Backward& set : sets_) {
      const float* const x = filled(problem.x);
      const float* const dy = filled(problem.dy);
      float* const dx = take(size);
      float* const dweight = take(2 * problem.cols);
      set = {problem.rows, problem.cols, x,  dy,      weight,
             mean,         rstd,         dx, dweight, dweight + problem.cols};
    }
  }
  ~Buffers() {
    for (float* memory : memory_) cudaFree(memory);
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  const std::vector<Backward>& sets() const { return sets_; }

  // Bytes of 0xff are NaNs: a result that nobody wrote is found.
  void spoil_outputs() const {
    for (const Backward& set : sets_) {
      CHECK(cudaMemset(set.dx, 0xff, set.rows * set.cols * sizeof(float)));
      CHECK(cudaMemset(set.dweight, 0xff, 2 * set.cols * sizeof(float)));
    }
  }

  // The largest error over its bound, in any gradient of the last set.
  double error(const Gradients& expected) const {
    const Backward& set = sets_.back();
    double worst = 0;
    auto compare = [&](const Bounded& right, const float* device) {
      std::vector<float> got(right.value.size());
      CHECK(cudaMemcpy(got.data(), device, got.size() * sizeof(float), cudaMemcpyDeviceToHost));
      worst = std::max(worst, error_over_bound(right, got));
    };
    compare(expected.dx, set.dx);
    compare(expected.dweight, set.dweight);
    compare(expected.dbias, set.dbias);
    return worst;
  }

 private:
  float* take(size_t count) {
    float* memory = nullptr;
    CHECK(cudaMalloc(&memory, count * sizeof(float)));
    memory_.push_back(memory);
    return memory;
  }
  const float* filled(const std::vector<float>& values) {
    float* const memory = take(values.size());
    CHECK(cudaMemcpy(memory, values.data(), values.size() * sizeof(float), cudaMemcpyHostToDevice));
    return memory;
  }

  std::vector<Backward> sets_;
  std::vector<float*> memory_;
};

// Time.

class Timer {
 public:
  Timer() {
    CHECK(cudaStreamCreate(&stream_));
    for (cudaEvent_t& event : events_) CHECK(cudaEventCreate(&event));
    CHECK(cudaMallocHost(&clocks_, 2 * sizeof(uint64_t)));
  }

  // Median microseconds of a launch, over replays of a CUDA graph of many launches, which walk
  // through the sets again and again.
  template <typename Launch>
  double microseconds(const std::vector<Backward>& sets, Launch launch) {
    // The first launch loads the kernel; the second tells how many fit the time.
    CHECK(launch(sets[0], stream_));
    const double one = elapsed([&] { CHECK(launch(sets[0], stream_)); });
    constexpr double kGraph = 500, kAll = 100e3;  // microseconds
    const int rounds = std::clamp(static_cast<int>(kGraph / one / sets.size()), 1, 100);
    const int calls = rounds * static_cast<int>(sets.size());
    const int replays = std::clamp(static_cast<int>(kAll / one / calls), 3, 51);

    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replay = nullptr;
    CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int call = 0; call < calls; ++call) CHECK(launch(sets[call % sets.size()], stream_));
    CHECK(cudaStreamEndCapture(stream_, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    CHECK(cudaGraphLaunch(replay, stream_));
    std::vector<double> times(replays);
    for (double& time : times) time = elapsed([&] { CHECK(cudaGraphLaunch(replay, stream_)); });
    CHECK(cudaGraphExecDestroy(replay));
    CHECK(cudaGraphDestroy(graph));
    std::nth_element(times.begin(), times.begin() + replays / 2, times.end());
    return times[replays / 2] / calls;
  }

  // The clock of the multiprocessors now, before it can fall after the timed work.
  double megahertz();

 private:
  template <typename Work>
  double elapsed(Work work) {
    float milliseconds = 0;
    CHECK(cudaEventRecord(events_[0], stream_));
    work();
    CHECK(cudaEventRecord(events_[1], stream_));
    CHECK(cudaEventSynchronize(events_[1]));
    CHECK(cudaEventElapsedTime(&milliseconds, events_[0], events_[1]));
    return 1e3 * milliseconds;
  }

  cudaStream_t stream_ = nullptr;
  cudaEvent_t events_[2] = {};
  uint64_t* clocks_ = nullptr;  // cycles, nanoseconds; in host memory
};

__device__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Cycles of a multiprocessor in about half a millisecond, both taken at ticks of the timer, which
// on some chips are a microsecond apart.
__global__ void count_cycles(uint64_t* clocks) {
  auto next_tick = [](uint64_t after) {
    uint64_t now;
    while ((now = nanoseconds()) <= after) continue;
    return now;
  };
  const uint64_t start = next_tick(nanoseconds());
  const long long first = clock64();
  const uint64_t end = next_tick(start + 500'000);
  clocks[0] = clock64() - first;
  clocks[1] = end - start;
}

double Timer::megahertz() {
  count_cycles<<<1, 1, 0, stream_>>>(clocks_);
  CHECK(cudaGetLastError());
  CHECK(cudaStreamSynchronize(stream_));
  return 1e3 * clocks_[0] / clocks_[1];
}

// The table, and the same as CSV.

struct Result {
  const char *step, *how;
  double microseconds, megahertz, error;

  double cycles() const { return microseconds * megahertz; }
  bool right() const { return error <= 1; }
};

struct Size {
  int64_t rows;
  int cols;
};

class Report {
 public:
  Report(const cudaDeviceProp& device, std::FILE* csv) : device_(device), csv_(csv) {
    CHECK(cudaDriverGetVersion(&driver_));
    const std::time_t now = std::time(nullptr);
    std::strftime(date_, sizeof(date_), "%Y-%m-%d %H:%M", std::localtime(&now));
    std::printf("%s, %d multiprocessors, %.0f MB L2 cache. Right: error over its bound up to 1.\n",
                device.name, device.multiProcessorCount, device.l2CacheSize / 1e6);
    if (csv == nullptr) return;
    std::fprintf(
        csv_,
        "date,gpu,driver_cuda,runtime_cuda,rows,cols,buffers,step,how,microseconds,clock_mhz,"
        "cycles,terabytes_per_second,error_over_bound\n");
  }
  ~Report() {
    if (csv_ != nullptr) std::fclose(csv_);
  }

  void begin(const Size& size, int sets) {
    first_ = 0;
    std::printf("\n%lld x %d, ", static_cast<long long>(size.rows), size.cols);
    if (sets == 1) {
      std::printf("one set of buffers, which the L2 cache can hold\n");
    } else {
      std::printf("%d sets of buffers in turn, out of the L2 cache\n", sets);
    }
    std::printf("%-11s %-42s %10s %12s %6s %8s %8s\n", "step", "", "us", "cycles", "TB/s", "faster",
                "error");
  }

  void add(const Size& size, int sets, const Result& result) {
    // x and dy once in, dx once out: what any of them must move.
    const double terabytes = 3.0 * size.rows * size.cols * sizeof(float) / 1e12;
    const double rate = terabytes / (result.microseconds / 1e6);
    if (first_ == 0) first_ = result.microseconds;
    std::printf("%-11s %-42s %10.1f %12.0f %6.2f %7.1fx %8.2g%s\n", result.step, result.how,
                result.microseconds, result.cycles(), rate, first_ / result.microseconds,
                result.error, result.right() ? "" : " WRONG");
    std::fflush(stdout);
    if (csv_ == nullptr) return;
    std::fprintf(csv_, "%s,%s,%d.%d,%d.%d,%lld,%d,%s,%s,%s,%.3f,%.0f,%.0f,%.4f,%.3g\n", date_,
                 device_.name, driver_ / 1000, driver_ % 1000 / 10, CUDART_VERSION / 1000,
                 CUDART_VERSION % 1000 / 10, static_cast<long long>(size.rows), size.cols,
                 sets == 1 ? "cached" : "rotating", result.step, result.how, result.microseconds,
                 result.megahertz, result.cycles(), rate, result.error);
  }

 private:
  cudaDeviceProp device_;
  std::FILE* csv_;
  int driver_ = 0;
  char date_[32] = {};
  double first_ = 0;
};

// Times all steps at a size. Returns whether all are right.
bool climb(const Size& size, const Problem<float>& problem, const Gradients& expected, int sets,
           Timer& timer, Report& report) {
  const Buffers buffers(problem, sets);
  const Library library(buffers.sets()[0]);
  bool all_right = true;
  auto step = [&](const char* name, const char* how, auto launch) {
    buffers.spoil_outputs();
    Result result{name, how, timer.microseconds(buffers.sets(), launch), timer.megahertz(), 0};
    result.error = buffers.error(expected);
    report.add(size, sets, result);
    all_right &= result.right();
  };
  report.begin(size, sets);
  step("v1", "a thread a row", launch_v1);
  step("v2", "a warp a row", launch_v2);
  step("v3", "a warp a row; dy in shared memory", launch_v3);
  step("v4", "1024 threads a row", launch_v4);
  step("v5", "rows walked by a block; atomics at its end", launch_v5);
  step("fused_norm", "this library: no atomics",
       [&](const Backward& b, cudaStream_t stream) { return library.launch(b, stream); });
  return all_right;
}

int fail(const std::string& sentence) {
  std::fprintf(stderr, "backward_ladder: %s\n", sentence.c_str());
  return 2;
}

int run(int count, char** arguments) {
  const char* csv_path = nullptr;
  std::vector<Size> sizes;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    long long rows = 0;
    int cols = 0, length = 0;
    if (argument == "--help") return std::fputs(kUsage, stdout), 0;
    if (argument == "--csv" && i + 1 < count) {
      csv_path = arguments[++i];
    } else if (std::sscanf(argument.c_str(), "%lldx%d%n", &rows, &cols, &length) == 2 &&
               length == static_cast<int>(argument.size()) && rows > 0 && rows < 1 << 30 &&
               cols > 0 && cols <= kMaxCols) {
      sizes.push_back({rows, cols});
    } else {
      return fail("'" + argument +
                  "' is neither --csv FILE nor a size such as 1024x2048 of at most " +
                  std::to_string(kMaxCols) + " columns.");
    }
  }
  if (sizes.empty()) sizes = {{1024, 2048}, {16384, 2048}, {8192, 4096}};

  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0)
    return fail(std::string("a CUDA GPU is needed: ") + cudaGetErrorString(error) + ".");
  int device = 0;
  cudaDeviceProp properties;
  CHECK(cudaGetDevice(&device));
  CHECK(cudaGetDeviceProperties(&properties, device));

  std::FILE* const csv = csv_path ? std::fopen(csv_path, "w") : nullptr;
  if (csv_path && !csv)
    return fail(std::string("--csv ") + csv_path + " cannot be written: " + std::strerror(errno));
  Report report(properties, csv);
  Timer timer;
  bool all_right = true;
  for (const Size& size : sizes) {
    const Problem<float> problem = make_problem<float>(size.rows, size.cols);
    const Gradients expected = solve(problem);
    const double set_bytes = 3.0 * size.rows * size.cols * sizeof(float);
    // The L2 cache holds a set of half its size, mostly; eight times the cache between two uses of
    // a set leave nothing of it.
    if (set_bytes < properties.l2CacheSize / 2)
      all_right &= climb(size, problem, expected, 1, timer, report);
    const int sets = 1 + static_cast<int>(std::ceil(8.0 * properties.l2CacheSize / set_bytes));
    if (sets <= 1000) all_right &= climb(size, problem, expected, sets, timer, report);
  }
  return all_right ? 0 : 1;
}

}  // namespace
}  // namespace backward_ladder

int main(int count, char** arguments) { return backward_ladder::run(count, arguments); }
