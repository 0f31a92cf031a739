// The program of a rung: reads the flags, makes the inputs, runs the rung, checks it against float64 and times it.
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <memory>
#include <numeric>

#include "harness.h"

namespace ladder {
namespace {

void cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

struct Free {
  void operator()(void* x) const { cudaFree(x); }
};
using Buffer = std::unique_ptr<void, Free>;

Buffer allocate(size_t bytes) {
  void* x = nullptr;
  if (bytes) cuda(cudaMalloc(&x, bytes), "cudaMalloc");
  return Buffer(x);
}

int64_t bytes_of(Element element) { return element == Element::f32 ? 4 : 2; }

// Device memory of the rung's element type that holds x.
Buffer upload(Element element, const std::vector<float>& x) {
  Buffer floats = allocate(x.size() * sizeof(float)), result = allocate(x.size() * bytes_of(element));
  cuda(cudaMemcpy(floats.get(), x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice), "upload");
  to_element(element, static_cast<float*>(floats.get()), result.get(), x.size(), nullptr);
  cuda(cudaDeviceSynchronize(), "upload");
  return result;
}

std::vector<float> download(Element element, const void* x, int64_t count) {
  std::vector<float> result(count);
  Buffer floats = allocate(count * sizeof(float));
  to_float(element, x, static_cast<float*>(floats.get()), count, nullptr);
  cuda(cudaMemcpy(result.data(), floats.get(), count * sizeof(float), cudaMemcpyDeviceToHost), "download");
  return result;
}

// ---- The GPU and what it lacks

struct Gpu {
  std::string name;
  int capability = 0;
  size_t shared_bytes = 0, free_bytes = 0;
};

// CUDA reports a driver that is missing as one that is too old.
std::string why_no_gpu(cudaError_t status) {
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);  // 0 where there is none
  cudaRuntimeGetVersion(&runtime);
  const auto cuda = [](int x) { return "CUDA " + std::to_string(x / 1000) + "." + std::to_string(x % 1000 / 10); };
  if (!driver) return "no GPU was found: there is no NVIDIA driver; one for " + cuda(runtime) + " is needed";
  return std::string("no GPU was found: ") + cudaGetErrorString(status) + " (driver: " + cuda(driver) +
         ", this program: " + cuda(runtime) + ")";
}

Gpu find_gpu() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || !count) throw Stop{std::string(rung.name) + ": " + why_no_gpu(status) + "\n", kNoGpu};
  cudaDeviceProp properties;
  cuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  Gpu gpu{properties.name, 10 * properties.major + properties.minor, properties.sharedMemPerBlockOptin, 0};
  size_t total;
  cuda(cudaMemGetInfo(&gpu.free_bytes, &total), "cudaMemGetInfo");
  return gpu;
}

// Rejects, before anything is launched, what this GPU cannot run.
void require_gpu(const Gpu& gpu, const Options& options, size_t shared, size_t workspace) {
  const auto reject = [](const std::string& text) { throw Stop{std::string(rung.name) + ": " + text + "\n", kUsage}; };
  const Problem& p = options.problem;
  if (rung.capability && gpu.capability != rung.capability) {
    reject("the GPU (" + gpu.name + ") has compute capability " + std::to_string(gpu.capability) +
           ", allowed: " + std::to_string(rung.capability));
  }
  if (shared > gpu.shared_bytes) {
    reject("a block needs " + std::to_string(shared) + " bytes of shared memory at --dim " + std::to_string(p.dim) +
           ", available: " + std::to_string(gpu.shared_bytes) + " on " + gpu.name);
  }
  // q, k, v, o and, beside them, the largest of them in f32 while it is copied.
  const int64_t layer =
      options.d_model ? 2ll * p.batch * p.seq * options.d_model + 4ll * p.heads * p.dim * options.d_model : 0;
  const size_t needed = workspace + (4 * p.elements() + layer) * bytes_of(rung.element) +
                        std::max(p.elements(), layer) * sizeof(float) + p.seq * static_cast<size_t>(p.dim) * 4;
  if (needed > gpu.free_bytes) {
    reject("the problem needs " + std::to_string(needed) + " bytes of GPU memory (" + std::to_string(workspace) +
           " of them for the workspace of the kernel), available: " + std::to_string(gpu.free_bytes) + " on " +
           gpu.name);
  }
}

// ---- The problem on the GPU

struct Run {
  Options options;
  const Kernel& kernel;  // the one that is timed
  Tensors tensors{};     // without d_model; with it, q, k and v as the reference computes them
  Layer layer{};         // with d_model
  Buffer q{}, k{}, v{}, o{}, workspace{}, rotations{};
  Buffer x{}, wq{}, wk{}, wv{}, wo{}, y{};  // with d_model
  Arguments arguments{};

  const Problem& problem() const { return options.problem; }
  void launch(const Kernel& which) const { which.launch(options.problem, arguments, nullptr); }
  void before() const;  // from x to q, k and v, rotated
  void after() const;   // from o to y
};

void Run::before() const {
  const Problem& p = problem();
  if (options.d_model) {
    project_in(rung.element, p, options.d_model, x.get(), wq.get(), q.get(), nullptr);
    project_in(rung.element, p, options.d_model, x.get(), wk.get(), k.get(), nullptr);
    project_in(rung.element, p, options.d_model, x.get(), wv.get(), v.get(), nullptr);
  }
  if (options.rope != Pairing::none && !rung.rotates) {
    const auto* table = static_cast<const Rotation*>(rotations.get());
    for (void* each : {q.get(), k.get()}) {
      rope(rung.element, each, static_cast<int64_t>(p.batch) * p.heads, p.seq, p.dim, table, options.rope, nullptr);
    }
  }
}

void Run::after() const {
  if (options.d_model) project_out(rung.element, problem(), options.d_model, o.get(), wo.get(), y.get(), nullptr);
}

// The projections of a layer as the GPU rounds them: to the element type.
std::vector<float> projected(const Run& run, const std::vector<float>& w) {
  const Problem& p = run.problem();
  const int64_t rows = static_cast<int64_t>(p.batch) * p.seq, inner = static_cast<int64_t>(p.heads) * p.dim;
  const std::vector<double> x(run.layer.x.begin(), run.layer.x.end());
  const std::vector<double> product = reference_product(x, w, rows, run.options.d_model, inner);
  std::vector<float> result(p.elements());
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < inner; ++column) {
      const int64_t at = ((row / p.seq * p.heads + column / p.dim) * p.seq + row % p.seq) * p.dim + column % p.dim;
      result[at] = round_to(rung.element, static_cast<float>(product[row * inner + column]));
    }
  }
  return result;
}

Run prepare(const Options& options, size_t workspace_bytes) {
  Run run{options, kernel_of(rung, options.kernel)};
  const Problem& p = options.problem;
  const size_t bytes = p.elements() * bytes_of(rung.element);
  if (options.d_model) {
    run.layer = make_layer(options);
    run.q = allocate(bytes), run.k = allocate(bytes), run.v = allocate(bytes);
    run.x = upload(rung.element, run.layer.x), run.wo = upload(rung.element, run.layer.wo);
    run.wq = upload(rung.element, run.layer.wq), run.wk = upload(rung.element, run.layer.wk);
    run.wv = upload(rung.element, run.layer.wv);
    run.y = allocate(run.layer.x.size() * bytes_of(rung.element));
    if (options.check) {
      run.tensors = {projected(run, run.layer.wq), projected(run, run.layer.wk), projected(run, run.layer.wv)};
    }
  } else {
    run.tensors = make_tensors(options, rung.element);
    run.q = upload(rung.element, run.tensors.q), run.k = upload(rung.element, run.tensors.k);
    run.v = upload(rung.element, run.tensors.v);
  }
  // Whatever the kernel leaves out stays NaN, and the check finds it.
  run.o = allocate(bytes);
  cuda(cudaMemset(run.o.get(), 0xff, bytes), "cudaMemset");
  run.workspace = allocate(workspace_bytes);
  if (workspace_bytes) cuda(cudaMemset(run.workspace.get(), 0xff, workspace_bytes), "cudaMemset");
  if (options.rope != Pairing::none) {
    const std::vector<Rotation> table = make_rotations(p.seq, p.dim);
    run.rotations = allocate(table.size() * sizeof(Rotation));
    cuda(cudaMemcpy(run.rotations.get(), table.data(), table.size() * sizeof(Rotation), cudaMemcpyHostToDevice),
         "upload");
  }
  const bool rotates = rung.rotates && options.rope != Pairing::none;
  run.arguments = {run.q.get(),
                   run.k.get(),
                   run.v.get(),
                   run.o.get(),
                   run.workspace.get(),
                   rotates ? static_cast<const Rotation*>(run.rotations.get()) : nullptr,
                   rotates ? options.rope : Pairing::none};
  return run;
}

// ---- The check

struct Report {
  double bound = 0;
  Errors errors;    // against float64 attention over what the kernel multiplies
  Errors original;  // against float64 attention over the inputs; differs for rungs that quantize
  bool cached = false;
};

double largest_of(const std::vector<float>& x) {
  double largest = 0;
  for (float value : x) largest = std::max(largest, std::abs(static_cast<double>(value)));
  return largest;
}

double largest_norm(const std::vector<double>& x, int dim) {
  double largest = 0;
  for (size_t row = 0; row < x.size(); row += dim) {
    largest = std::max(largest, std::inner_product(&x[row], &x[row] + dim, &x[row], 0.0));
  }
  return std::sqrt(largest);
}

// The reference result for q, k and v, from the cache or computed: o, or y of a layer.
std::vector<double> reference(const Run& run, Cache& cache, const std::vector<double>& q, const std::vector<double>& k,
                              const std::vector<float>& v) {
  const Problem& p = run.problem();
  const int64_t rows = static_cast<int64_t>(p.batch) * p.seq, inner = static_cast<int64_t>(p.heads) * p.dim;
  Hash hash;
  for (int64_t x : {p.batch, p.heads, p.seq, p.dim, static_cast<int>(p.causal), run.options.d_model}) hash.add(x);
  hash.add(q), hash.add(k), hash.add(v), hash.add(run.layer.wo);
  return cache.get(hash.hex(), run.options.d_model ? rows * run.options.d_model : p.elements(), [&] {
    std::vector<double> o = reference_attention(p, q, k, {v.begin(), v.end()});
    if (!run.options.d_model) return o;
    std::vector<double> joined(o.size());  // [batch, seq, heads, dim], rounded as o is
    for (int64_t i = 0; i < p.elements(); ++i) {
      const int64_t c = i % p.dim, s = i / p.dim % p.seq, h = i / p.dim / p.seq % p.heads,
                    b = i / p.dim / p.seq / p.heads;
      joined[((b * p.seq + s) * p.heads + h) * p.dim + c] = o[i];
    }
    return reference_product(joined, run.layer.wo, rows, inner, run.options.d_model);
  });
}

Report check_result(const Run& run, const Kernel& kernel) {
  const Problem& p = run.problem();
  const bool layer = run.options.d_model;
  const int64_t heads = layer ? p.batch : static_cast<int64_t>(p.batch) * p.heads;
  const std::vector<float> result = layer ? download(rung.element, run.y.get(), run.layer.x.size())
                                          : download(rung.element, run.o.get(), p.elements());
  Cache cache(run.options.cache, run.options.cache_dir);
  const Rotated rotated = rotate(run.options, rung, run.tensors);

  Report report;
  const double score = p.scale() * largest_norm(rotated.q, p.dim) * largest_norm(rotated.k, p.dim);
  report.bound = error_bound(p, rung.element, score, run.options.input == Input::constant);
  double largest = largest_of(run.tensors.v);
  if (layer) {
    // The projections round q, k, v and y once more, and sum d_model channels in f32.
    report.bound += error_bound(p, rung.element, 0) + 0x1p-24 * run.options.d_model;
    std::vector<double> columns(run.options.d_model, 0.0);
    for (size_t i = 0; i < run.layer.wo.size(); ++i) columns[i % columns.size()] += std::abs(run.layer.wo[i]);
    largest *= *std::max_element(columns.begin(), columns.end());
  }
  const std::vector<double> expected = reference(run, cache, rotated.q, rotated.k, run.tensors.v);
  report.cached = cache.hit();
  report.errors = report.original = compare(result, expected, heads, report.bound, largest);
  if (kernel.as_seen) {
    std::vector<float> q(rotated.q.begin(), rotated.q.end()), k(rotated.k.begin(), rotated.k.end()), v = run.tensors.v;
    kernel.as_seen(p, q, k, v);
    const std::vector<double> seen = reference(run, cache, {q.begin(), q.end()}, {k.begin(), k.end()}, v);
    report.cached &= cache.hit();
    report.errors = compare(result, seen, heads, report.bound, largest);
  }
  return report;
}

// ---- The time

// Milliseconds of every run.
std::vector<float> time_runs(const Options& options, const std::function<void()>& work) {
  for (int i = 0; i < options.warmup; ++i) work();
  std::vector<cudaEvent_t> events(options.runs + 1);
  for (cudaEvent_t& event : events) cuda(cudaEventCreate(&event), "cudaEventCreate");
  cuda(cudaEventRecord(events[0], nullptr), "cudaEventRecord");
  for (int i = 0; i < options.runs; ++i) {
    work();
    cuda(cudaEventRecord(events[i + 1], nullptr), "cudaEventRecord");
  }
  cuda(cudaDeviceSynchronize(), "the timed runs");
  std::vector<float> times(options.runs);
  for (int i = 0; i < options.runs; ++i)
    cuda(cudaEventElapsedTime(&times[i], events[i], events[i + 1]), "cudaEventElapsedTime");
  for (cudaEvent_t event : events) cudaEventDestroy(event);
  std::sort(times.begin(), times.end());
  return times;
}

// ---- The report

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) >= ' ') result += c;
  }
  return result + '"';
}

const char* word(bool x) { return x ? "true" : "false"; }

std::string date() {
  char text[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

void print(const Run& run, const Gpu& gpu, const Report& report, const std::vector<float>& times, float layer_ms,
           size_t shared, size_t workspace) {
  const Options& options = run.options;
  const Problem& p = options.problem;
  // Two products of 2 seq^2 dim operations for each head; about half of them are masked where it is causal.
  const double flops = 4.0 * p.rows() * (p.causal ? (p.seq + 1) / 2.0 : p.seq) * p.dim;
  const double median = times.empty() ? 0 : times[times.size() / 2];
  const bool part = run.kernel.part;
  if (!options.json) {
    std::printf("%s %s: %s, batch %d, heads %d, seq %d, dim %d%s%s on %s\n", rung.name, run.kernel.name,
                name_of(rung.element), p.batch, p.heads, p.seq, p.dim, p.causal ? ", causal" : "",
                options.d_model ? ", a layer" : "", gpu.name.c_str());
    std::printf("  shared memory of a block: %zu of %zu bytes; workspace: %zu bytes\n", shared, gpu.shared_bytes,
                workspace);
    if (options.check) {
      std::printf("  check %s: relative L2 error %.3g (allowed %.3g), largest error %.3g, not finite %lld%s\n",
                  report.errors.passed ? "passed" : "FAILED", report.errors.relative_l2, report.bound,
                  report.errors.max_absolute, static_cast<long long>(report.errors.not_finite),
                  report.cached ? "; reference from the cache" : "");
      if (run.kernel.as_seen) {
        std::printf("  against the values before quantization: relative L2 error %.3g\n", report.original.relative_l2);
      }
    }
    if (!times.empty()) {
      std::printf("  time: %.4f ms (median of %zu, fastest %.4f)", median, times.size(), times.front());
      if (!part) std::printf(", %.2f TFLOP/s", flops / median * 1e-9);
      std::printf("\n");
      if (options.d_model) std::printf("  whole layer: %.4f ms\n", layer_ms);
    }
    return;
  }
  int runtime = 0, driver = 0;
  cudaRuntimeGetVersion(&runtime);
  cudaDriverGetVersion(&driver);
  std::printf(
      "{\"rung\": %s, \"kernel\": %s, \"element\": %s, \"batch\": %d, \"heads\": %d, \"seq\": %d, \"dim\": %d, "
      "\"causal\": %s, \"rope\": %s, \"d_model\": %d, \"input\": %s, ",
      quoted(rung.name).c_str(), quoted(run.kernel.name).c_str(), quoted(name_of(rung.element)).c_str(), p.batch,
      p.heads, p.seq, p.dim, word(p.causal), quoted(name_of(options.rope)).c_str(), options.d_model,
      options.input == Input::random     ? "\"random\""
      : options.input == Input::constant ? "\"constant\""
                                         : "\"file\"");
  std::printf("\"shared_bytes\": %zu, \"workspace_bytes\": %zu, ", shared, workspace);
  if (options.check) {
    // JSON has no infinity.
    std::printf(
        "\"check\": {\"passed\": %s, \"relative_l2\": %.9g, \"bound\": %.9g, \"max_absolute\": %.9g, "
        "\"not_finite\": %lld, \"relative_l2_of_inputs\": %.9g}, ",
        word(report.errors.passed), std::min(report.errors.relative_l2, 1e300), report.bound,
        report.errors.max_absolute, static_cast<long long>(report.errors.not_finite),
        std::min(report.original.relative_l2, 1e300));
  }
  if (!times.empty()) {
    std::printf("\"time\": {\"median_ms\": %.6f, \"fastest_ms\": %.6f, \"slowest_ms\": %.6f, \"runs\": %zu", median,
                times.front(), times.back(), times.size());
    if (!part) std::printf(", \"tflops\": %.4f", flops / median * 1e-9);
    if (options.d_model) std::printf(", \"layer_ms\": %.6f", layer_ms);
    std::printf("}, ");
  }
  std::printf("\"gpu\": %s, \"capability\": %d, \"cuda_runtime\": %d, \"cuda_driver\": %d, \"date\": %s}\n",
              quoted(gpu.name).c_str(), gpu.capability, runtime, driver, quoted(date()).c_str());
}

int run_program(int argc, char** argv) {
  const Options options = parse(argc, argv, rung);
  const Kernel& whole = kernel_of(rung, options.kernel).part ? rung.kernels.front() : kernel_of(rung, options.kernel);
  const size_t shared = whole.shared_bytes ? whole.shared_bytes(options.problem) : 0;
  const size_t workspace = whole.workspace_bytes ? whole.workspace_bytes(options.problem) : 0;
  const Gpu gpu = find_gpu();
  require_gpu(gpu, options, shared, workspace);

  const Run run = prepare(options, workspace);
  run.before();
  cuda(cudaProfilerStart(), "cudaProfilerStart");  // a profiler sees the rung alone (ladder/profile)
  run.launch(whole);
  cuda(cudaProfilerStop(), "cudaProfilerStop");
  run.after();
  cuda(cudaDeviceSynchronize(), rung.name);
  Report report;
  if (options.check) report = check_result(run, whole);
  std::vector<float> times;
  float layer_ms = 0;
  if (options.runs) {
    times = time_runs(options, [&] { run.launch(run.kernel); });
    if (options.d_model) {
      const auto whole_layer = [&] { run.before(), run.launch(whole), run.after(); };
      layer_ms = time_runs(options, whole_layer)[options.runs / 2];
    }
  }
  print(run, gpu, report, times, layer_ms, shared, workspace);
  return options.check && !report.errors.passed ? kWrong : 0;
}

}  // namespace
}  // namespace ladder

int main(int argc, char** argv) {
  try {
    return ladder::run_program(argc, argv);
  } catch (const ladder::Stop& stop) {
    std::fputs(stop.text.c_str(), stop.status ? stderr : stdout);
    return stop.status;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", ladder::rung.name, error.what());
    return ladder::kWrong;
  }
}
