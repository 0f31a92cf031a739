// Finds out from an instruction's text which handler and which registers it has.
#include <thread>

#include "decoder.h"
#include "handlers.h"

namespace emulator {
namespace {

// Calls found with a value of the type that a name of PTX means.
template <class F>
Handler of_type(const std::string& type, const F& found) {
  if (type == "u16" || type == "b16") return found(u16{});
  if (type == "s16") return found(s16{});
  if (type == "u32" || type == "b32") return found(u32{});
  if (type == "s32") return found(s32{});
  if (type == "u64" || type == "b64") return found(u64{});
  if (type == "s64") return found(s64{});
  if (type == "f32") return found(f32{});
  if (type == "f64") return found(f64{});
  if (type == "pred") return found(u8{});
  return nullptr;
}
u8 bytes_of(const std::string& type) {
  if (type == "pred" || type == "u8" || type == "s8" || type == "b8") return 1;
  if (type == "f16" || type == "bf16") return 2;
  if (type == "f16x2" || type == "bf16x2") return 4;
  const u8 bits = static_cast<u8>(std::stoi(type.substr(1)));
  return bits / 8;
}

template <auto f>
Handler unary_of(const std::string& type) {
  return of_type(type, []<class T>(T) -> Handler {
    if constexpr (requires { f(T{}); })
      return unary<f, T, T>;
    else
      return nullptr;
  });
}
template <auto f>
Handler binary_of(const std::string& type) {
  return of_type(type, []<class T>(T) -> Handler {
    if constexpr (requires { f(T{}, T{}); })
      return binary<f, T, T, T>;
    else
      return nullptr;
  });
}
constexpr bool is_float(const std::string& type) { return type[0] == 'f'; }

// Comparisons; the last letter u of a name makes an unordered pair true.
template <class T>
Handler comparison_of(const std::string& name) {
  if (name == "eq") return binary<[](T a, T b) { return u8(a == b); }, u8, T, T>;
  if (name == "ne") return binary<[](T a, T b) { return u8(a < b || a > b); }, u8, T, T>;
  if (name == "lt" || name == "lo") return binary<[](T a, T b) { return u8(a < b); }, u8, T, T>;
  if (name == "le" || name == "ls") return binary<[](T a, T b) { return u8(a <= b); }, u8, T, T>;
  if (name == "gt" || name == "hi") return binary<[](T a, T b) { return u8(a > b); }, u8, T, T>;
  if (name == "ge" || name == "hs") return binary<[](T a, T b) { return u8(a >= b); }, u8, T, T>;
  if (name == "equ") return binary<[](T a, T b) { return u8(!(a < b || a > b)); }, u8, T, T>;
  if (name == "neu") return binary<[](T a, T b) { return u8(a != b); }, u8, T, T>;
  if (name == "ltu") return binary<[](T a, T b) { return u8(!(a >= b)); }, u8, T, T>;
  if (name == "leu") return binary<[](T a, T b) { return u8(!(a > b)); }, u8, T, T>;
  if (name == "gtu") return binary<[](T a, T b) { return u8(!(a <= b)); }, u8, T, T>;
  if (name == "geu") return binary<[](T a, T b) { return u8(!(a < b)); }, u8, T, T>;
  if (name == "nan") return binary<[](T a, T b) { return u8(a != a || b != b); }, u8, T, T>;
  if (name == "num") return binary<[](T a, T b) { return u8(a == a && b == b); }, u8, T, T>;
  return nullptr;
}

template <class S>
Handler convert_from(const std::string& to, const std::string& rounding) {
  if (to == "f32" && std::is_same_v<S, f32>)
    return rounding == "rni"   ? unary<[](f32 a) { return std::nearbyint(a); }, f32, f32>
           : rounding == "rzi" ? unary<[](f32 a) { return std::trunc(a); }, f32, f32>
           : rounding == "rmi" ? unary<[](f32 a) { return std::floor(a); }, f32, f32>
           : rounding == "sat" ? unary<[](f32 a) { return std::fmin(std::fmax(a, 0.f), 1.f); }, f32, f32>
                               : nullptr;
  if (to == "f32") return unary<[](S a) { return static_cast<f32>(a); }, f32, S>;
  if (to == "f64") return unary<[](S a) { return static_cast<f64>(a); }, f64, S>;
  if constexpr (std::is_floating_point_v<S>) {
    if (to == "s32" && rounding == "rni") return unary<[](S a) { return saturated<s32>(std::nearbyint(a)); }, s32, S>;
    if (to == "s32" && rounding == "rzi") return unary<[](S a) { return saturated<s32>(std::trunc(a)); }, s32, S>;
    if (to == "s32" && rounding == "rmi") return unary<[](S a) { return saturated<s32>(std::floor(a)); }, s32, S>;
    if (to == "u32" && rounding == "rzi") return unary<[](S a) { return saturated<u32>(std::trunc(a)); }, u32, S>;
    if (to == "s64" && rounding == "rzi") return unary<[](S a) { return saturated<s64>(std::trunc(a)); }, s64, S>;
  }
  return nullptr;
}

template <class T, class Address, Space space>
Handler atomic_of(const std::string& operation) {
  if (operation == "add") return atomic<add, T, Address, space>;
  if (operation == "max") return atomic<maximum, T, Address, space>;
  if (operation == "min") return atomic<minimum, T, Address, space>;
  if constexpr (std::is_integral_v<T>) {
    if (operation == "or") return atomic<bit_or, T, Address, space>;
    if (operation == "and") return atomic<bit_and, T, Address, space>;
  }
  return nullptr;
}

Handler special_of(const std::string& name) {
  if (name == "%laneid") return special<0, 4>;
  const auto axis_of = [&]<int what>() -> Handler {
    switch (name.back()) {
      case 'x':
        return special<0, what>;
      case 'y':
        return special<1, what>;
      default:
        return special<2, what>;
    }
  };
  if (name.starts_with("%tid.")) return axis_of.operator()<0>();
  if (name.starts_with("%ntid.")) return axis_of.operator()<1>();
  if (name.starts_with("%ctaid.")) return axis_of.operator()<2>();
  if (name.starts_with("%nctaid.")) return axis_of.operator()<3>();
  return nullptr;
}

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::string part;
  int depth = 0;
  for (const char c : text) {
    if (c == '{' || c == '[' || c == '(') ++depth;
    if (c == '}' || c == ']' || c == ')') --depth;
    if (c == by && !depth) {
      parts.push_back(part), part.clear();
    } else if (by == '.' || (c != ' ' && c != '\n' && c != '\t')) {
      part += c;
    }
  }
  parts.push_back(part);
  return parts;
}
std::vector<std::string> members(const std::string& token) {  // of {a, b}, or the token alone
  if (!token.starts_with('{')) return {token};
  return split(token.substr(1, token.size() - 2), ',');
}

// An instruction's text in parts: "add.s32 %r1, %r2, 3" has the name {add, s32} and the tokens {%r1, %r2, 3}.
struct Statement {
  Decoder& decoder;
  Instruction& out;
  std::vector<std::string> name, tokens;
  std::string operation, type;
  std::size_t used = 0;

  Statement(const std::string& text, Decoder& decoder, Instruction& out) : decoder(decoder), out(out) {
    const std::size_t space = text.find_first_of(" \t\n");
    name = split(text.substr(0, space), '.');
    if (space != std::string::npos) tokens = split(text.substr(space + 1), ',');
    operation = name.front(), type = name.back();
  }
  bool has(const char* word) const {
    for (std::size_t i = 1; i < name.size(); ++i)
      if (name[i] == word) return true;
    return false;
  }
  bool in(std::initializer_list<const char*> words) const {
    for (const char* word : words)
      if (operation == word) return true;
    return false;
  }
  // Adds an operand of `bytes` (0: any) and returns its bytes.
  int take(const std::string& token, int bytes) {
    const Register r = decoder.operand(token, static_cast<u8>(bytes));
    out.operand[used++] = r.place;
    return r.bytes;
  }
  void take_all(int bytes) {
    for (const std::string& token : tokens) take(token, bytes);
  }
  // Of [base] or [base+offset].
  int take_address(std::string token) {
    token = token.substr(1, token.size() - 2);
    const std::size_t plus = token.find('+', 1);
    if (plus != std::string::npos) {
      out.offset = static_cast<int64_t>(Decoder::parse_number(token.substr(plus + 1)));
      token = token.substr(0, plus);
    }
    return take(token, 0);
  }

  // Calls and returns. Fences have nothing to do: memory is that of one process.
  void control() {
    if (operation == "ret" || operation == "exit") {
      out.kind = Instruction::exit, out.run = no_operation;
    } else if (in({"membar", "fence", "griddepcontrol"})) {
      out.run = no_operation;
    } else if (operation == "nanosleep") {
      out.run = [](Warp&, const Instruction&, Lanes) { std::this_thread::yield(); };
    } else if (operation == "call") {  // (result), function, (arguments)
      for (const auto& token : tokens) {
        if (token[0] != '(') {
          out.callee = token;
          continue;
        }
        for (const auto& argument : split(token.substr(1, token.size() - 2), ','))
          if (!argument.empty()) out.arguments.push_back(decoder.operand(argument, 8).place);
      }
      out.run = call;
    }
  }
  // Loads, stores, atomics, copies and address spaces.
  void memory() {
    if (operation == "cvta") {
      take_all(8);
      out.run = !has("shared") ? unary<copy, u64, u64> : has("to") ? generic_to_shared : shared_to_generic;
    } else if (in({"ld", "st"})) {
      const bool loads = operation == "ld", shared = has("shared");
      const auto registers = members(tokens[loads ? 0 : 1]);
      out.count = static_cast<u32>(registers.size());
      const int bytes = bytes_of(type);
      int width = 0;
      for (const auto& r : registers) {
        const bool is_number = r[0] == '-' || (r[0] >= '0' && r[0] <= '9');
        width = take(r, is_number ? std::max(bytes, 2) : 0);
      }
      const int address_bytes = take_address(tokens[loads ? 1 : 0]);
      out.target = static_cast<u32>(bytes | width << 4 | (type[0] == 's') << 8);
      if (loads)
        out.run = address_bytes == 4 ? (shared ? load<u32, Space::shared> : load<u32, Space::generic>)
                                     : (shared ? load<u64, Space::shared> : load<u64, Space::generic>);
      else
        out.run = address_bytes == 4 ? (shared ? store<u32, Space::shared> : store<u32, Space::generic>)
                                     : (shared ? store<u64, Space::shared> : store<u64, Space::generic>);
    } else if (in({"atom", "red"})) {
      const bool shared = has("shared");
      const int bytes = bytes_of(type);
      if (operation == "atom")
        take(tokens[0], bytes);
      else
        out.operand[used++] = decoder.new_register(static_cast<u8>(bytes)).place;
      const int address_bytes = take_address(tokens[tokens.size() - 2]);
      take(tokens.back(), bytes);
      out.run = of_type(type, [&]<class T>(T) -> Handler {
        if constexpr (sizeof(T) < 4)
          return nullptr;
        else {
          for (std::size_t i = 1; i + 1 < name.size(); ++i) {
            const Handler handler = !shared              ? atomic_of<T, u64, Space::generic>(name[i])
                                    : address_bytes == 4 ? atomic_of<T, u32, Space::shared>(name[i])
                                                         : atomic_of<T, u64, Space::shared>(name[i]);
            if (handler) return handler;
          }
          return nullptr;
        }
      });
    } else if (operation == "cp" && has("commit_group")) {
      out.run = [](Warp& w, const Instruction&, Lanes lanes) { each(lanes, [&](int i) { ++w.copy_group[i]; }); };
    } else if (operation == "cp" && (has("wait_group") || has("wait_all"))) {
      out.offset = has("wait_all") ? -1 : static_cast<int64_t>(Decoder::parse_number(tokens[0]));
      out.run = [](Warp& w, const Instruction& n, Lanes lanes) {
        each(lanes, [&](int i) {
          if (n.offset < 0) ++w.copy_group[i];
          finish_copies(w, i, n.offset < 0 ? 0 : static_cast<u32>(n.offset));
        });
      };
    } else if (operation == "cp" && has("async")) {
      const int address_bytes = take_address(tokens[0]);
      const int64_t to = out.offset;
      take_address(tokens[1]);
      out.target = static_cast<u32>(tokens[1].find('+') == std::string::npos ? 0 : out.offset), out.offset = to;
      out.count = static_cast<u32>(Decoder::parse_number(tokens[2]));
      take(tokens.size() > 3 ? tokens[3] : tokens[2], 4);
      out.run = address_bytes == 4 ? copy_async<u32> : copy_async<u64>;
    }
  }
  // Moves, selections, comparisons and conversions.
  void conversion() {
    if (operation == "mov") {
      const int bytes = bytes_of(type);
      const auto to = members(tokens[0]), from = members(tokens[1]);
      if (to.size() == 2) {
        for (const auto& t : to) take(t, bytes / 2);
        take(from[0], bytes), out.run = bytes == 4 ? split_32 : split_64;
      } else if (from.size() == 2) {
        take(to[0], bytes);
        for (const auto& t : from) take(t, bytes / 2);
        out.run = bytes == 4 ? binary<join_32, u32, u16, u16> : binary<join_64, u64, u32, u32>;
      } else if (const Handler handler = special_of(from[0])) {
        take(to[0], bytes), out.run = handler;
      } else {
        take_all(bytes), out.run = unary_of<copy>(type);
      }
    } else if (operation == "setp") {
      take(tokens[0], 1);
      take(tokens[1], bytes_of(type)), take(tokens[2], bytes_of(type));
      out.run = of_type(type, [&]<class T>(T) { return comparison_of<T>(name[1]); });
    } else if (operation == "set" && has("lt")) {
      take_all(4);
      if (type == "f32" && name[2] == "f32")
        out.run = binary<[](f32 a, f32 b) { return a < b ? 1.f : 0.f; }, f32, f32, f32>;
      if (type == "f16x2" && name[2] == "u32")
        out.run = binary<[](u32 a, u32 b) { return of_halves<less_f16>(a, b); }, u32, u32, u32>;
    } else if (operation == "selp") {
      const int bytes = bytes_of(type);
      take(tokens[0], bytes), take(tokens[1], bytes), take(tokens[2], bytes), take(tokens[3], 1);
      out.run = of_type(type, []<class T>(T) -> Handler { return ternary<select, T, T, T, u8>; });
    } else if (operation == "cvt" && has("pack")) {
      take_all(4);
      out.run = has("s8")   ? ternary<pack_bytes<-128, 127>, u32, s32, s32, u32>
                : has("u8") ? ternary<pack_bytes<0, 255>, u32, s32, s32, u32>
                            : nullptr;
    } else if (operation == "cvt") {
      const std::string& to = name[name.size() - 2];
      const std::string rounding = name.size() > 3 ? name[1] : "";
      if (to == "e4m3x2" && has("satfinite")) {
        take(tokens[0], 2), take(tokens[1], 4), take(tokens[2], 4);
        out.run = binary<[](f32 a, f32 b) { return static_cast<u16>(to_e4m3(a) << 8 | to_e4m3(b)); }, u16, f32, f32>;
      } else if (to == "f16x2" && type == "e4m3x2") {
        take(tokens[0], 4), take(tokens[1], 2);
        out.run = unary<[](u16 a) {
          const auto half = [](u16 code) { return to_f16(from_e4m3(static_cast<u8>(code))); };
          return static_cast<u32>(half(a >> 8)) << 16 | half(a);
        },
                        u32, u16>;
      } else if (to == "f16x2" || to == "bf16x2") {
        take_all(4);
        out.run = to == "f16x2" ? convert_pair<to_f16> : convert_pair<to_bf16>;
      } else if (to == "f16" || to == "bf16") {
        take(tokens[0], 2), take(tokens[1], 4);
        out.run = to == "f16" ? unary<[](f32 a) { return to_f16(a); }, u16, f32>
                              : unary<[](f32 a) { return to_bf16(a); }, u16, f32>;
      } else if (type == "f16" || type == "bf16") {
        take(tokens[0], 4), take(tokens[1], 2);
        out.run = type == "f16" ? unary<[](u16 a) { return f16_table()[a]; }, f32, u16>
                                : unary<[](u16 a) { return from_bf16(a); }, f32, u16>;
      } else if (!is_float(to) && !is_float(type)) {
        const int wide = take(tokens[0], 0), from = take(tokens[1], 0);
        const int bytes = std::min(bytes_of(type), bytes_of(to));
        const bool has_sign = bytes_of(type) < bytes_of(to) ? type[0] == 's' : to[0] == 's';
        out.offset = bytes | has_sign << 4 | from << 5 | wide << 9, out.run = convert_integer;
      } else {
        take(tokens[0], bytes_of(to)), take(tokens[1], bytes_of(type));
        out.run = of_type(type, [&]<class T>(T) { return convert_from<T>(to, rounding); });
      }
    }
  }
  // What the lanes of a warp do together.
  void collective() {
    if (operation == "shfl") {
      const auto both = split(tokens[0], '|');
      take(both[0], 4);
      if (both.size() > 1)
        take(both[1], 1);
      else
        out.operand[used++] = decoder.new_register(1).place;
      for (std::size_t i = 1; i < 5; ++i) take(tokens[i], 4);  // operand[5]: the mask
      out.run = has("idx") ? shuffle<0> : has("bfly") ? shuffle<1> : has("up") ? shuffle<2> : shuffle<3>;
      out.kind = Instruction::collective, out.target = out.operand[5];
    } else if (operation == "vote") {
      take(tokens[0], has("ballot") ? 4 : 1), take(tokens[1], 1), take(tokens[2], 4);
      out.run = has("ballot") ? vote<0> : has("all") ? vote<1> : vote<2>;
      out.kind = Instruction::collective, out.target = out.operand[2];
    } else if (operation == "redux") {
      take_all(4);
      out.kind = Instruction::collective, out.target = out.operand[2];
      if (has("max")) out.run = type == "s32" ? reduce<maximum, s32> : reduce<maximum, u32>;
      if (has("min")) out.run = type == "s32" ? reduce<minimum, s32> : reduce<minimum, u32>;
      if (has("add")) out.run = reduce<add, u32>;
      if (has("or")) out.run = reduce<bit_or, u32>;
    } else if (operation == "bar" && has("warp")) {
      take(tokens[0], 4), out.kind = Instruction::collective, out.target = out.operand[0], out.run = no_operation;
    } else if (in({"bar", "barrier"})) {
      out.kind = Instruction::barrier, out.run = no_operation;
      if (has("red")) {
        take(tokens[0], 1), take(tokens[2], 1);
        out.count = has("or") ? 1 : 2;
      }
      if (tokens[has("red") ? 1 : 0] != "0") throw Error("a barrier other than 0");
    } else if (operation == "ldmatrix") {
      const auto registers = members(tokens[0]);
      out.count = static_cast<u32>(registers.size());
      for (const auto& r : registers) take(r, 4);
      const int address_bytes = take_address(tokens[1]);
      out.kind = Instruction::collective, out.target = decoder.constant(Constant::number, kAllLanes, 4).place;
      out.run = has("trans") ? (address_bytes == 4 ? load_matrices<true, u32> : load_matrices<true, u64>)
                             : (address_bytes == 4 ? load_matrices<false, u32> : load_matrices<false, u64>);
    } else if (operation == "mma" && has("m16n8k16") && type == "f32") {
      for (const auto& token : tokens)
        for (const auto& r : members(token)) take(r, 4);
      out.kind = Instruction::collective, out.target = decoder.constant(Constant::number, kAllLanes, 4).place;
      out.run = has("bf16") ? multiply_matrices<true> : multiply_matrices<false>;
    } else if (operation == "mma" && has("m16n8k16") && type == "f16") {
      for (const auto& token : tokens)
        for (const auto& r : members(token)) take(r, 4);
      out.kind = Instruction::collective, out.target = decoder.constant(Constant::number, kAllLanes, 4).place;
      out.run = multiply_matrices_to_f16;
    } else if (operation == "mma" && has("m16n8k32") && type == "s32" && has("s8")) {
      for (const auto& token : tokens)
        for (const auto& r : members(token)) take(r, 4);
      out.kind = Instruction::collective, out.target = decoder.constant(Constant::number, kAllLanes, 4).place;
      out.run = has("u8") ? multiply_matrices_of_bytes<u8, s8> : multiply_matrices_of_bytes<s8, s8>;
    } else if (operation == "mma" && has("m16n8k32") && has("e4m3") && type == "f32") {
      for (const auto& token : tokens)
        for (const auto& r : members(token)) take(r, 4);
      out.kind = Instruction::collective, out.target = decoder.constant(Constant::number, kAllLanes, 4).place;
      out.run = multiply_matrices_of_e4m3;
    }
  }
  // Arithmetic and bits.
  void arithmetic() {
    if (in({"shl", "shr"})) {
      take(tokens[0], bytes_of(type)), take(tokens[1], bytes_of(type)), take(tokens[2], 4);
      const bool left = operation == "shl";
      out.run = of_type(type, [&]<class T>(T) -> Handler {
        if constexpr (std::is_integral_v<T>)
          return left ? binary<shift_left, T, T, u32> : binary<shift_right, T, T, u32>;
        else
          return nullptr;
      });
    } else if (operation == "mul" && has("wide")) {
      const int bytes = bytes_of(type);
      take(tokens[0], 2 * bytes), take(tokens[1], bytes), take(tokens[2], bytes);
      if (type == "s32") out.run = binary<[](s32 a, s32 b) { return s64{a} * b; }, s64, s32, s32>;
      if (type == "u32") out.run = binary<[](u32 a, u32 b) { return u64{a} * b; }, u64, u32, u32>;
      if (type == "u16") out.run = binary<[](u16 a, u16 b) { return u32{a} * b; }, u32, u16, u16>;
      if (type == "s16") out.run = binary<[](s16 a, s16 b) { return s32{a} * b; }, s32, s16, s16>;
    } else if (operation == "mul" && has("hi")) {
      take_all(bytes_of(type));
      out.run = of_type(type, []<class T>(T) -> Handler {
        if constexpr (std::is_integral_v<T>)
          return binary<multiply_high, T, T, T>;
        else
          return nullptr;
      });
    } else if (operation == "mad" && has("wide")) {
      const int bytes = bytes_of(type);
      take(tokens[0], 2 * bytes), take(tokens[1], bytes), take(tokens[2], bytes), take(tokens[3], 2 * bytes);
      if (type == "s32") out.run = ternary<[](s32 a, s32 b, s64 c) { return s64{a} * b + c; }, s64, s32, s32, s64>;
      if (type == "u32") out.run = ternary<[](u32 a, u32 b, u64 c) { return u64{a} * b + c; }, u64, u32, u32, u64>;
    } else if (operation == "mad" && has("lo")) {
      take_all(bytes_of(type));
      out.run = of_type(type, []<class T>(T) -> Handler {
        return ternary<[](T a, T b, T c) { return add(multiply(a, b), c); }, T, T, T, T>;
      });
    } else if (operation == "fma") {
      take_all(bytes_of(type));
      if (type == "f32" && has("rn"))
        out.run = ternary<[](f32 a, f32 b, f32 c) { return std::fma(a, b, c); }, f32, f32, f32, f32>;
      if (type == "f64" && has("rn"))
        out.run = ternary<[](f64 a, f64 b, f64 c) { return std::fma(a, b, c); }, f64, f64, f64, f64>;
      if (type == "f32" && has("rm")) out.run = ternary<multiply_add_down, f32, f32, f32, f32>;
    } else if (operation == "prmt") {
      take_all(4), out.run = permute_bytes;
    } else if (operation == "bfi") {
      const int bytes = bytes_of(type);
      for (std::size_t i = 0; i < tokens.size(); ++i) take(tokens[i], i < 3 ? bytes : 4);
      out.run = bytes == 4 ? insert_bits<u32> : insert_bits<u64>;
    } else if (operation == "clz") {
      take_all(4), out.run = unary<[](u32 a) { return static_cast<u32>(std::countl_zero(a)); }, u32, u32>;
    } else if (operation == "bfind" && has("shiftamt") && type == "u32") {
      take_all(4), out.run = unary<[](u32 a) { return a ? static_cast<u32>(std::countl_zero(a)) : ~0u; }, u32, u32>;
    } else if (operation == "brev") {
      take_all(4), out.run = unary<reversed_bits, u32, u32>;
    } else if (operation == "popc") {
      take_all(4), out.run = unary<[](u32 a) { return static_cast<u32>(std::popcount(a)); }, u32, u32>;
    } else if (operation == "copysign") {
      take_all(4), out.run = binary<[](f32 a, f32 b) { return std::copysign(b, a); }, f32, f32, f32>;
    } else if (in({"ex2", "rcp", "rsqrt", "sqrt", "lg2", "tanh"})) {
      take_all(bytes_of(type));
      if (type == "f32" && operation == "ex2")
        out.run = has("ftz") ? unary<power_of_two_flushed, f32, f32> : unary<power_of_two, f32, f32>;
      if (type == "f32" && operation == "rcp") out.run = unary<[](f32 a) { return 1 / a; }, f32, f32>;
      if (type == "f64" && operation == "rcp") out.run = unary<[](f64 a) { return 1 / a; }, f64, f64>;
      if (type == "f32" && operation == "rsqrt")
        out.run = unary<[](f32 a) { return static_cast<f32>(1 / std::sqrt(static_cast<f64>(a))); }, f32, f32>;
      if (type == "f32" && operation == "sqrt") out.run = unary<[](f32 a) { return std::sqrt(a); }, f32, f32>;
      if (type == "f64" && operation == "sqrt") out.run = unary<[](f64 a) { return std::sqrt(a); }, f64, f64>;
      if (type == "f32" && operation == "lg2") out.run = unary<[](f32 a) { return std::log2(a); }, f32, f32>;
      if (type == "f32" && operation == "tanh") out.run = unary<[](f32 a) { return std::tanh(a); }, f32, f32>;
    } else if (type == "pred" && in({"and", "or", "xor", "not"})) {
      take_all(1);
      out.run = operation == "and"   ? binary<bit_and, u8, u8, u8>
                : operation == "or"  ? binary<bit_or, u8, u8, u8>
                : operation == "xor" ? binary<bit_xor, u8, u8, u8>
                                     : unary<[](u8 a) { return u8(!a); }, u8, u8>;
    } else if (in({"and", "or", "xor", "not", "rem"})) {
      take_all(bytes_of(type));
      const auto bits = of_type(type, [&]<class T>(T) -> Handler {
        if constexpr (!std::is_integral_v<T>)
          return nullptr;
        else
          return operation == "and"   ? binary<bit_and, T, T, T>
                 : operation == "or"  ? binary<bit_or, T, T, T>
                 : operation == "xor" ? binary<bit_xor, T, T, T>
                 : operation == "rem" ? binary<remainder, T, T, T>
                                      : unary<bit_not, T, T>;
      });
      out.run = bits;
    } else if (in({"add", "sub", "mul", "div", "min", "max"})) {
      if (has("cc")) throw Error("add with carry");
      take_all(bytes_of(type));
      if (type.ends_with("x2")) {
        constexpr Handler of_f16 = binary<[](u32 a, u32 b) { return of_halves<larger_f16>(a, b); }, u32, u32, u32>,
                          of_bf16 = binary<[](u32 a, u32 b) { return of_halves<larger_bf16>(a, b); }, u32, u32, u32>;
        if (operation == "max") out.run = type == "f16x2" ? of_f16 : of_bf16;
        if (operation == "sub" && type == "f16x2")
          out.run = binary<[](u32 a, u32 b) { return of_halves<difference_f16>(a, b); }, u32, u32, u32>;
        if (operation == "mul" && type == "f16x2")
          out.run = binary<[](u32 a, u32 b) { return of_halves<product_f16>(a, b); }, u32, u32, u32>;
      } else if (has("NaN")) {
        if (type == "f32") out.run = operation == "max" ? binary<maximum_or_nan, f32, f32, f32> : nullptr;
      } else
        out.run = operation == "add"   ? binary_of<add>(type)
                  : operation == "sub" ? binary_of<subtract>(type)
                  : operation == "mul" ? binary_of<multiply>(type)
                  : operation == "div" ? binary_of<divide>(type)
                  : operation == "min" ? binary_of<minimum>(type)
                                       : binary_of<maximum>(type);
    } else if (operation == "abs" && bytes_of(type) == 4 && type.ends_with("x2")) {
      take_all(4), out.run = unary<[](u32 a) { return a & 0x7fff7fffu; }, u32, u32>;
    } else if (in({"neg", "abs"})) {
      take_all(bytes_of(type));
      out.run = operation == "neg" ? unary_of<negate>(type) : unary_of<absolute>(type);
    }
  }
};

}  // namespace

void decode(const std::string& text, Decoder& decoder, Instruction& out) {
  Statement statement(text, decoder, out);
  for (auto group : {&Statement::control, &Statement::memory, &Statement::conversion, &Statement::collective,
                     &Statement::arithmetic})
    if (!out.run) (statement.*group)();
  if (!out.run) throw Error("no such instruction here: " + text);
}

}  // namespace emulator
