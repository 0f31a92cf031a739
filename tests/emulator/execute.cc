// Runs warps, thread blocks and grids. The lanes of a warp that are furthest behind go first, so that those which took
// different branches meet again.
#include <algorithm>
#include <atomic>
#include <bit>
#include <mutex>
#include <thread>

#include "program.h"

namespace emulator {

namespace {

constexpr unsigned char kPoison = 0xff;  // NaN in every format

void set_constants(Frame& frame, uint64_t parameters, uint32_t dynamic_shared) {
  for (const Constant& c : frame.function->constants)
    for (int i = 0; i < kLanes; ++i) {
      uint64_t value = c.value;
      if (c.kind == Constant::parameter) value += parameters;
      if (c.kind == Constant::dynamic_shared) value += dynamic_shared;
      if (c.kind == Constant::local)
        value +=
            reinterpret_cast<uint64_t>(frame.local.data()) + static_cast<uint64_t>(i) * frame.function->local_bytes;
      std::memcpy(frame.registers.data() + c.place + i * c.bytes, &value, c.bytes);
    }
}

}  // namespace

void enter(Frame& frame, Function& function, Lanes lanes, uint64_t parameters, uint32_t dynamic_shared) {
  frame.function = &function;
  frame.registers.assign(function.register_bytes, kPoison);
  frame.local.assign(static_cast<std::size_t>(function.local_bytes) * kLanes + 16, kPoison);
  frame.pc.fill(0);
  frame.alive = lanes, frame.blocked = 0;
  set_constants(frame, parameters, dynamic_shared);
}

bool run(Warp& w, Frame& frame) {
  w.frame = &frame, w.registers = frame.registers.data();
  const std::vector<Instruction>& code = frame.function->code;
  while (frame.alive) {
    // The lanes that are furthest behind, and where the next ones wait.
    uint32_t pc = ~0u, next = ~0u;
    Lanes lanes = 0;
    for (Lanes rest = frame.alive; rest; rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      if (frame.pc[i] < pc && !(frame.blocked >> i & 1)) pc = frame.pc[i];
    }
    if (pc == ~0u)
      throw Error("lanes of a warp wait for each other: " + code[frame.pc[std::countr_zero(frame.blocked)]].text);
    for (Lanes rest = frame.alive; rest; rest &= rest - 1) {
      const int i = std::countr_zero(rest);
      if (frame.pc[i] == pc)
        lanes |= Lanes{1} << i;
      else if (frame.pc[i] > pc)
        next = std::min(next, frame.pc[i]);
    }
    const auto leave = [&](Lanes who, uint32_t to) {
      for (Lanes rest = who; rest; rest &= rest - 1) frame.pc[std::countr_zero(rest)] = to;
    };
    for (bool together = true; together;) {
      const Instruction& n = code[pc];
      Lanes active = lanes;
      if (n.guarded) {
        const uint8_t* guard = w.at<uint8_t>(n.guard);
        Lanes values = 0;
        for (int i = 0; i < kLanes; ++i) values |= static_cast<Lanes>((guard[i] != 0) != n.negated) << i;
        active &= values;
      }
      switch (n.kind) {
        case Instruction::plain:
          if (active) n.run(w, n, active);
          ++pc;
          break;
        case Instruction::collective: {
          if (active) {
            const Lanes wanted = w.at<Lanes>(n.target)[std::countr_zero(active)] & frame.alive;
            if (wanted & ~active) {
              if (n.guarded) throw Error("a collective that a predicate keeps from some lanes: " + n.text);
              leave(lanes, pc), frame.blocked |= lanes, together = false;
              break;
            }
            frame.blocked &= ~active;
            n.run(w, n, active);
          }
          ++pc;
          break;
        }
        case Instruction::branch:
          leave(active, n.target), leave(lanes & ~active, pc + 1);
          if (active == lanes && n.target <= next && n.target > pc)
            pc = n.target;  // nobody is left behind
          else if (!active)
            ++pc;
          else
            together = false;
          break;
        case Instruction::exit:
          leave(lanes, pc + 1);
          frame.alive &= ~active;
          if (active == lanes)
            together = false;
          else
            lanes &= ~active, ++pc;
          break;
        case Instruction::barrier:
          if (active != lanes) throw Error("a barrier under a predicate: " + n.text);
          leave(lanes, pc);
          if (lanes != frame.alive) {
            frame.blocked |= lanes, together = false;
            break;
          }
          frame.blocked = 0;
          leave(lanes, pc + 1);
          w.waits = true, w.barrier_operation = static_cast<int>(n.count), w.barrier_lanes = lanes;
          if (n.count) {
            w.barrier_result_place = n.operand[0], w.barrier_values = 0;
            for (Lanes rest = lanes; rest; rest &= rest - 1) {
              const int i = std::countr_zero(rest);
              w.barrier_values |= static_cast<Lanes>(w.at<uint8_t>(n.operand[1])[i] != 0) << i;
            }
          }
          return false;
      }
      if (together && pc >= next) leave(lanes, pc), together = false;
    }
  }
  return true;
}

namespace {

void run_block(Block& block, Function& kernel, uint32_t dynamic_shared, uint64_t parameters, uint32_t seed) {
  const uint32_t threads = block.threads[0] * block.threads[1] * block.threads[2];
  const uint32_t dynamic_offset = (kernel.shared_bytes + 127) / 128 * 128;
  block.shared_bytes = dynamic_offset + dynamic_shared;
  block.shared.resize(block.shared_bytes / sizeof(Chunk) + 1);
  std::memset(block.shared.data(), kPoison, block.shared.size() * sizeof(Chunk));
  std::vector<Warp> warps((threads + kLanes - 1) / kLanes);
  std::vector<Frame> frames(warps.size());
  for (uint32_t i = 0; i < warps.size(); ++i) {
    warps[i].block = &block, warps[i].index = static_cast<int>(i);
    Lanes lanes = 0;
    for (uint32_t lane = 0; lane < kLanes && i * kLanes + lane < threads; ++lane) {
      const uint32_t t = i * kLanes + lane;
      warps[i].thread[lane] = {t % block.threads[0], t / block.threads[0] % block.threads[1],
                               t / block.threads[0] / block.threads[1]};
      lanes |= Lanes{1} << lane;
    }
    enter(frames[i], kernel, lanes, parameters, dynamic_offset);
  }
  std::vector<uint32_t> order(warps.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::vector<bool> done(warps.size(), false);
  for (std::size_t running = warps.size(); running;) {
    // Between barriers the warps run one after another, in an order that changes.
    for (std::size_t i = order.size(); i > 1; --i) {
      seed = seed * 1664525u + 1013904223u;
      std::swap(order[i - 1], order[(seed >> 8) % i]);
    }
    for (const uint32_t i : order) {
      if (done[i]) continue;
      try {
        if (run(warps[i], frames[i])) done[i] = true, --running;
      } catch (const Error& e) {
        throw Error(kernel.name + ", block " + std::to_string(block.index[0]) + ", warp " + std::to_string(i) + ": " +
                    e.what());
      }
    }
    // All that are left wait for the barrier.
    bool any = false, all = true;
    for (uint32_t i = 0; i < warps.size(); ++i)
      if (!done[i]) {
        any |= warps[i].barrier_values != 0;
        all &= (warps[i].barrier_values & warps[i].barrier_lanes) == warps[i].barrier_lanes;
      }
    for (uint32_t i = 0; i < warps.size(); ++i) {
      if (done[i]) continue;
      warps[i].waits = false;
      if (warps[i].barrier_operation)
        for (Lanes rest = warps[i].barrier_lanes; rest; rest &= rest - 1)
          (frames[i].registers.data() + warps[i].barrier_result_place)[std::countr_zero(rest)] =
              warps[i].barrier_operation == 1 ? any : all;
    }
  }
}

}  // namespace

void run_grid(Module& module, Function& kernel, std::array<uint32_t, 3> grid, std::array<uint32_t, 3> threads,
              uint32_t dynamic_shared, const std::vector<unsigned char>& parameters) {
  const uint64_t blocks = uint64_t{grid[0]} * grid[1] * grid[2];
  std::atomic<uint64_t> next{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    Block block{{}, grid, threads, {}, 0, &module};
    for (uint64_t i; (i = next++) < blocks;) {
      block.index = {static_cast<uint32_t>(i % grid[0]), static_cast<uint32_t>(i / grid[0] % grid[1]),
                     static_cast<uint32_t>(i / grid[0] / grid[1])};
      try {
        run_block(block, kernel, dynamic_shared, reinterpret_cast<uint64_t>(parameters.data()),
                  static_cast<uint32_t>(i));
      } catch (...) {
        const std::lock_guard lock(mutex);
        error = std::current_exception(), next = blocks;
      }
    }
  };
  const uint64_t workers = std::min<uint64_t>(blocks, std::thread::hardware_concurrency());
  std::vector<std::thread> others;
  for (uint64_t i = 1; i < workers; ++i) others.emplace_back(work);
  work();
  for (auto& t : others) t.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace emulator
