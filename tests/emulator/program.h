// A kernel's PTX as a list of decoded instructions, and the state of the warp that runs them.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulator {

using Lanes = uint32_t;  // a bit for each lane of a warp
constexpr int kLanes = 32;
constexpr Lanes kAllLanes = ~Lanes{0};

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Warp;
struct Function;

struct Instruction {
  enum Kind : uint8_t {
    plain,
    branch,
    exit,        // ret; of a kernel: its end
    collective,  // waits for the lanes of a mask
    barrier,     // waits for the thread block
  };
  void (*run)(Warp&, const Instruction&, Lanes) = nullptr;
  Kind kind = plain;
  bool guarded = false, negated = false;
  uint32_t guard = 0;                  // of the predicate
  std::array<uint32_t, 14> operand{};  // places of registers in a warp's register file
  int64_t offset = 0;                  // of an address, in bytes; or another number that the instruction holds
  uint32_t count = 0;                  // registers of a vector
  uint32_t target = 0;                 // of a branch
  std::string callee;                  // of a call
  std::vector<uint32_t> arguments;     // of a call: registers with their addresses
  std::string text;
};

// Registers that have one value in all lanes and through a whole run.
struct Constant {
  enum Kind { number, parameter, local, dynamic_shared } kind;
  uint64_t value;  // a number, or an offset into the memory of that kind
  uint8_t bytes;   // of a lane
  uint32_t place;
};

struct Parameter {
  uint32_t offset, bytes;
};

struct Function {
  std::string name, body;  // PTX, decoded on first use
  bool decoded = false;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  uint32_t parameter_bytes = 0, register_bytes = 0, local_bytes = 0, shared_bytes = 0;
  std::vector<Constant> constants;
};

struct Module {
  std::unordered_map<std::string, Function> functions;
  explicit Module(const std::string& ptx);
  // Returns the function, decoded.
  Function& find(const std::string& name);
};

struct Copy {  // by cp.async
  unsigned char* to;
  const unsigned char* from;
  uint32_t bytes, read, group;
};

struct alignas(128) Chunk {
  unsigned char bytes[128];
};

struct Block {
  std::array<uint32_t, 3> index, grid, threads;
  std::vector<Chunk> shared;
  uint32_t shared_bytes = 0;
  Module* module;
};

// The registers of one call of a function.
struct Frame {
  Function* function = nullptr;
  std::vector<unsigned char> registers, local;
  std::array<uint32_t, kLanes> pc{};
  Lanes alive = 0, blocked = 0;
};

struct Warp {
  Block* block = nullptr;
  int index = 0;
  std::array<std::array<uint32_t, 3>, kLanes> thread{};
  Frame* frame = nullptr;
  unsigned char* registers = nullptr;  // of the frame
  std::array<std::vector<Copy>, kLanes> copies;
  std::array<uint32_t, kLanes> copy_group{};
  // A barrier that this warp waits for.
  bool waits = false;
  uint32_t barrier_result_place = 0;
  int barrier_operation = 0;  // 0 sync, 1 or, 2 and
  Lanes barrier_values = 0, barrier_lanes = 0;

  template <class T>
  T* at(uint32_t place) {
    return reinterpret_cast<T*>(registers + place);
  }
  unsigned char* shared(uint64_t offset, uint64_t bytes) {
    if (offset + bytes > block->shared_bytes)
      throw Error("an access to " + std::to_string(bytes) + " bytes of shared memory at " + std::to_string(offset) +
                  ", of " + std::to_string(block->shared_bytes));
    return block->shared.front().bytes + offset;
  }
};

// Prepares a frame for `lanes` of a function; parameters[lane] is where a lane's parameters lie.
void enter(Frame& frame, Function& function, Lanes lanes, uint64_t parameters, uint32_t dynamic_shared);
// Runs until every lane has left the frame (true) or waits for a barrier (false).
bool run(Warp& warp, Frame& frame);
// Runs a grid, thread block after thread block.
void run_grid(Module& module, Function& kernel, std::array<uint32_t, 3> grid, std::array<uint32_t, 3> threads,
              uint32_t dynamic_shared, const std::vector<unsigned char>& parameters);

}  // namespace emulator
