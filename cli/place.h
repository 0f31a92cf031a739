// A place is the device that a pass runs on. Commands hold tensors in host memory; for a call on a GPU they are copied
// there, and its outputs back.
#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <octet/octet.hpp>
#include <string>
#include <vector>

#include "device.h"

namespace octet::cli {

// Seconds of one call.
struct Timing {
  double median = 0, least = 0;
};

// The memory and the clock of one call.
class Place {
 public:
  virtual ~Place() = default;
  // A dense tensor of the host as the call shall see it.
  virtual Tensor input(const Tensor& host) = 0;
  virtual Tensor output(const Tensor& host) = 0;
  virtual void* workspace(std::size_t bytes) = 0;
  // Waits for what was launched and brings the outputs back.
  virtual void finish() = 0;
  // Seconds of a call in each of `runs` runs, after `warmup` others. On the host a run is one call by the wall clock;
  // on a GPU as many calls back to back as take some milliseconds, between two CUDA events.
  virtual std::vector<double> seconds(const std::function<void()>& call, int warmup, int runs) = 0;
};

// Rejects a device that cannot be used.
std::unique_ptr<Place> make_place(const DeviceName& device);
std::unique_ptr<Place> make_gpu_place(int device);  // where CUDA was built in

Timing timing_of(std::vector<double> seconds);

// Calls f(tensor, whether the pass writes it) for the tensors of a call.
template <class F>
void for_each_tensor(Extras& extras, const F& f) {
  for (Tensor* t : {&extras.sinks, &extras.alibi_slopes, &extras.dropout_seed}) f(*t, false);
}
template <class F>
void for_each_tensor(Forward& c, const F& f) {
  for (Tensor* t : {&c.q, &c.k, &c.v}) f(*t, false);
  for_each_tensor(c.extras, f);
  for (Tensor* t : {&c.o, &c.lse, &c.o_residual}) f(*t, true);
}
template <class F>
void for_each_tensor(Backward& c, const F& f) {
  for (Tensor* t : {&c.q, &c.k, &c.v, &c.o, &c.o_residual, &c.lse, &c.do_, &c.dlse}) f(*t, false);
  for_each_tensor(c.extras, f);
  for (Tensor* t : {&c.dq, &c.dk, &c.dv, &c.dsinks}) f(*t, true);
}
template <class F>
void for_each_tensor(Jvp& c, const F& f) {
  for (Tensor* t : {&c.q, &c.k, &c.v, &c.tq, &c.tk, &c.tv, &c.tsinks}) f(*t, false);
  for_each_tensor(c.extras, f);
  for (Tensor* t : {&c.o, &c.to, &c.lse, &c.tlse}) f(*t, true);
}

// The call as it would be on `device`, for questions that read no data: workspace_size, explain.
template <class Call>
Call supposed_on(const DeviceName& device, Call call) {
  for_each_tensor(call, [&](Tensor& t, bool) {
    t.device = static_cast<uint32_t>(device.kind);
    t.device_index = device.index;
  });
  return call;
}

// A call with its tensors and its workspace where it runs.
template <class Call>
class Job {
 public:
  Job(const DeviceName& device, const Attention& attention, const Call& host)
      : attention_(attention), place_(make_place(device)), call_(placed(host)) {
    bytes_ = workspace_size(attention_, call_);
    workspace_ = place_->workspace(capacity_ = bytes_);
  }
  void run() {
    launch();
    place_->finish();
  }
  // Makes later runs those of another attention, with the same tensors.
  void become(const Attention& attention) {
    attention_ = attention;
    bytes_ = workspace_size(attention_, call_);
    if (bytes_ > capacity_) workspace_ = place_->workspace(capacity_ = bytes_);
  }
  // Times without bringing outputs back.
  std::vector<double> seconds(int warmup, int runs) {
    return place_->seconds([this] { launch(); }, warmup, runs);
  }
  // Leaves what run leaves.
  Timing time(int warmup, int runs) {
    const Timing timing = timing_of(seconds(warmup, runs));
    place_->finish();
    return timing;
  }

 private:
  Call placed(Call call) {
    for_each_tensor(call, [this](Tensor& t, bool written) {
      if (t.present()) t = written ? place_->output(t) : place_->input(t);
    });
    return call;
  }
  void launch() { octet::run(attention_, call_, workspace_, bytes_); }

  Attention attention_;
  std::unique_ptr<Place> place_;
  Call call_;
  std::size_t bytes_ = 0, capacity_ = 0;
  void* workspace_ = nullptr;
};

}  // namespace octet::cli
