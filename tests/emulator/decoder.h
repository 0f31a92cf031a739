// What the text of an instruction refers to: registers and constants.
#pragma once
#include <map>
#include <tuple>

#include "program.h"

namespace emulator {

struct Register {
  uint32_t place;
  uint8_t bytes;  // of a lane
};

class Decoder {
 public:
  explicit Decoder(Function& function) : function_(function), scopes_(1) {}

  void push() { scopes_.emplace_back(); }
  void pop() { scopes_.pop_back(); }

  void add_register(const std::string& name, uint8_t bytes) { scopes_.back().registers[name] = new_register(bytes); }
  // A name whose value is an address or an offset.
  void add_symbol(const std::string& name, Constant::Kind kind, uint64_t value) {
    scopes_.back().symbols[name] = {kind, value};
  }

  // Returns the place of a register, a symbol or a number of which an instruction reads or writes `bytes` (0: any).
  Register operand(const std::string& token, uint8_t bytes) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto found = scope->registers.find(token); found != scope->registers.end()) {
        if (bytes && found->second.bytes != bytes)
          throw Error(token + " has " + std::to_string(found->second.bytes) + " bytes, not " + std::to_string(bytes));
        return found->second;
      }
      if (const auto found = scope->symbols.find(token); found != scope->symbols.end())
        return constant(found->second.first, found->second.second, bytes ? bytes : 8);
    }
    return constant(Constant::number, parse_number(token), bytes ? bytes : 8);
  }
  Register constant(Constant::Kind kind, uint64_t value, uint8_t bytes) {
    const auto [found, is_new] = constants_.try_emplace({kind, value, bytes});
    if (is_new) {
      found->second = new_register(bytes);
      function_.constants.push_back({kind, value, bytes, found->second.place});
    }
    return found->second;
  }

  static uint64_t parse_number(const std::string& token) {
    if (token.starts_with("0f") || token.starts_with("0F") || token.starts_with("0d") || token.starts_with("0D"))
      return std::stoull(token.substr(2), nullptr, 16);
    std::size_t used = 0;
    uint64_t value = 0;
    try {
      value =
          token.starts_with('-') ? static_cast<uint64_t>(std::stoll(token, &used, 0)) : std::stoull(token, &used, 0);
    } catch (const std::exception&) {
    }
    if (!used || (used != token.size() && token.substr(used) != "U")) throw Error("unknown operand " + token);
    return value;
  }

  Register new_register(uint8_t bytes) {
    const Register r{function_.register_bytes, bytes};
    function_.register_bytes += kLanes * bytes;
    return r;
  }

 private:
  struct Scope {
    std::unordered_map<std::string, Register> registers;
    std::unordered_map<std::string, std::pair<Constant::Kind, uint64_t>> symbols;
  };
  Function& function_;
  std::vector<Scope> scopes_;
  std::map<std::tuple<Constant::Kind, uint64_t, uint8_t>, Register> constants_;
};

// Decodes an instruction, without its guard and semicolon.
void decode(const std::string& statement, Decoder& decoder, Instruction& out);

}  // namespace emulator
