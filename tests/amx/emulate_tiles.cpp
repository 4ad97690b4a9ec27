// The tiles of AMX on a CPU that has none. Such a CPU raises SIGILL for an instruction on tiles; the handler here
// does what the instruction would do, and the program goes on behind it. All other instructions of the kernels for AMX
// are AVX512 up to BF16, which the CPU must have. A shared library for LD_PRELOAD: `make test-amx`.
//
// It shows what the kernels compute, and not how long they take: an instruction takes a microsecond.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, the pages of each instruction.
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr int NUM_TILES = 8;
constexpr int MAX_ROWS = 16, MAX_ROW_BYTES = 64, MAX_COLUMNS = MAX_ROW_BYTES / 4;

struct Tile {
  uint8_t rows[MAX_ROWS][MAX_ROW_BYTES];
  int num_rows, row_bytes;  // as configured

  int num_columns() const { return row_bytes / 4; }
};

struct Tiles {
  bool are_configured;
  Tile tiles[NUM_TILES];
};

thread_local Tiles tiles_of_thread;

// An instruction in the encoding VEX with three bytes, of opcode map 2: all instructions on tiles are such.
struct Instruction {
  enum Prefix { NONE, X66, XF3, XF2 };

  Prefix prefix;
  uint8_t opcode;
  bool has_memory;
  int reg, rm, vvvv;    // numbers of tiles; with a memory operand, `reg` alone
  uint8_t* base;        // address of the memory operand, without its index
  int64_t index;        // scaled, in bytes
  const uint8_t* next;  // the instruction behind this one

  Instruction(const uint8_t* at, const greg_t* registers);
};

int64_t register_of(const greg_t* registers, int number) {
  constexpr int PLACES[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return registers[PLACES[number]];
}

template <typename T>
T load_as(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

bool is_vex_of_map_2(const uint8_t* at) { return at[0] == 0xc4 && (at[1] & 0x1f) == 2 && (at[2] & 0x84) == 0; }

Instruction::Instruction(const uint8_t* at, const greg_t* registers) {
  const int extra_reg = at[1] & 0x80 ? 0 : 8, extra_index = at[1] & 0x40 ? 0 : 8, extra_base = at[1] & 0x20 ? 0 : 8;
  vvvv = ~at[2] >> 3 & 15;
  prefix = static_cast<Prefix>(at[2] & 3);
  opcode = at[3];
  const int mod = at[4] >> 6;
  reg = (at[4] >> 3 & 7) + extra_reg;
  rm = at[4] & 7;
  next = at + 5;
  base = nullptr;
  index = 0;
  has_memory = mod != 3;
  if (!has_memory) return;
  int base_register = rm;
  if (rm == 4) {
    const int sib = *next++;
    base_register = sib & 7;
    const int index_register = (sib >> 3 & 7) + extra_index;
    if (index_register != 4) index = register_of(registers, index_register) << (sib >> 6);
  }
  int64_t address = 0;
  const bool has_no_base = mod == 0 && base_register == 5;
  if (!has_no_base) address = register_of(registers, base_register + extra_base);
  if (mod == 1) address += static_cast<int8_t>(*next++);
  if (mod == 2 || has_no_base) {
    address += load_as<int32_t>(next);
    next += 4;
  }
  if (has_no_base && rm == 5) address += reinterpret_cast<int64_t>(next);  // relative to the next instruction
  base = reinterpret_cast<uint8_t*>(address);
}

bool configure(Tiles& to, const uint8_t* config) {
  to = {};
  constexpr int PALETTE = 0, ROW_BYTES = 16, NUM_ROWS = 48;  // places in the configuration
  if (config[PALETTE] != 1) return false;
  for (int i = 0; i < NUM_TILES; ++i) {
    Tile& tile = to.tiles[i];
    tile.row_bytes = load_as<uint16_t>(config + ROW_BYTES + 2 * i);
    tile.num_rows = config[NUM_ROWS + i];
    if (tile.num_rows > MAX_ROWS || tile.row_bytes > MAX_ROW_BYTES) return false;
  }
  to.are_configured = true;
  return true;
}

void clear(Tile& tile) { std::memset(tile.rows, 0, sizeof tile.rows); }

// Each row of A is multiplied with all columns of B; each element of B's rows consists of some factors of a column.
bool have_shapes_of_product(const Tile& sums, const Tile& a, const Tile& b) {
  return &sums != &a && &sums != &b && &a != &b && a.row_bytes == 4 * b.num_rows && a.num_rows == sums.num_rows &&
         b.row_bytes == sums.row_bytes;
}

// Even and odd elements are two chains of multiply-adds. Numbers round to the nearest, and denormals count as zeros,
// whatever the thread has set.
[[gnu::noinline]] void add_bfloat16_products(Tile& sums, const Tile& a, const Tile& b) {
  const auto even_of = [](uint32_t pair) { return __builtin_bit_cast(float, pair << 16); };
  const auto odd_of = [](uint32_t pair) { return __builtin_bit_cast(float, pair & 0xffff0000); };
  for (int row = 0; row < a.num_rows; ++row) {
    float even[MAX_COLUMNS] = {}, odd[MAX_COLUMNS] = {}, out[MAX_COLUMNS];
    for (int k = 0; k < b.num_rows; ++k) {
      const auto x = load_as<uint32_t>(a.rows[row] + 4 * k);
      uint32_t w[MAX_COLUMNS];
      std::memcpy(w, b.rows[k], sizeof w);
      for (int column = 0; column < MAX_COLUMNS; ++column) {
        even[column] = std::fma(even_of(x), even_of(w[column]), even[column]);
        odd[column] = std::fma(odd_of(x), odd_of(w[column]), odd[column]);
      }
    }
    std::memcpy(out, sums.rows[row], sizeof out);
    for (int column = 0; column < MAX_COLUMNS; ++column) out[column] += even[column] + odd[column];
    std::memcpy(sums.rows[row], out, b.row_bytes);
  }
}

// A, B: int8_t or uint8_t. Sums are modulo 2^32.
template <typename A, typename B>
void add_byte_products(Tile& sums, const Tile& a, const Tile& b) {
  for (int row = 0; row < a.num_rows; ++row) {
    uint32_t out[MAX_COLUMNS];
    std::memcpy(out, sums.rows[row], sizeof out);
    for (int byte = 0; byte < a.row_bytes; ++byte) {
      const int x = static_cast<A>(a.rows[row][byte]);
      for (int column = 0; column < b.num_columns(); ++column) {
        out[column] += static_cast<uint32_t>(x * static_cast<B>(b.rows[byte / 4][4 * column + byte % 4]));
      }
    }
    std::memcpy(sums.rows[row], out, b.row_bytes);
  }
}

// Returns whether the instruction is one on tiles, and does no more than a CPU would allow.
bool run(const Instruction& in) {
  Tiles& all = tiles_of_thread;
  const auto is = [&](uint8_t opcode, Instruction::Prefix prefix, bool has_memory) {
    return in.opcode == opcode && in.prefix == prefix && in.has_memory == has_memory;
  };
  if (is(0x49, Instruction::NONE, true)) return configure(all, in.base + in.index);  // ldtilecfg
  if (is(0x49, Instruction::NONE, false)) {                                          // tilerelease
    all = {};
    return true;
  }
  if (!all.are_configured || in.reg >= NUM_TILES) return false;
  Tile& tile = all.tiles[in.reg];
  if (is(0x49, Instruction::XF2, false)) {  // tilezero
    clear(tile);
    return true;
  }
  if (is(0x4b, Instruction::XF2, true)) {  // tileloadd
    clear(tile);
    for (int row = 0; row < tile.num_rows; ++row) std::memcpy(tile.rows[row], in.base + row * in.index, tile.row_bytes);
    return true;
  }
  if (is(0x4b, Instruction::XF3, true)) {  // tilestored
    for (int row = 0; row < tile.num_rows; ++row) std::memcpy(in.base + row * in.index, tile.rows[row], tile.row_bytes);
    return true;
  }
  if (in.has_memory || in.vvvv >= NUM_TILES) return false;
  const Tile &a = all.tiles[in.rm], &b = all.tiles[in.vvvv];
  if (!have_shapes_of_product(tile, a, b)) return false;
  if (is(0x5c, Instruction::XF3, false)) {  // tdpbf16ps
    constexpr unsigned FLUSHES_AND_MASKS = 0x9fc0;
    _mm_setcsr(FLUSHES_AND_MASKS);  // until the handler returns
    add_bfloat16_products(tile, a, b);
    return true;
  }
  if (is(0x5e, Instruction::XF3, false)) {  // tdpbsud
    add_byte_products<int8_t, uint8_t>(tile, a, b);
    return true;
  }
  if (is(0x5e, Instruction::XF2, false)) {  // tdpbssd
    add_byte_products<int8_t, int8_t>(tile, a, b);
    return true;
  }
  return false;
}

using Sigaction = int(int, const struct sigaction*, struct sigaction*);

Sigaction* sigaction_of_libc() {
  static const auto function = reinterpret_cast<Sigaction*>(dlsym(RTLD_NEXT, "sigaction"));
  return function;
}

// What cannot be emulated ends the process, as it does without the handler.
void handle(int, siginfo_t*, void* context) {
  greg_t* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const auto* at = reinterpret_cast<const uint8_t*>(registers[REG_RIP]);
  if (is_vex_of_map_2(at)) {
    const Instruction instruction(at, registers);
    if (run(instruction)) {
      registers[REG_RIP] = reinterpret_cast<greg_t>(instruction.next);
      return;
    }
  }
  constexpr char MESSAGE[] = "emulate_tiles: an instruction that is not on tiles, or that a CPU with tiles refuses\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, MESSAGE, sizeof MESSAGE - 1);
  struct sigaction by_default{};
  by_default.sa_handler = SIG_DFL;
  sigaction_of_libc()(SIGILL, &by_default, nullptr);
}

[[gnu::constructor]] void install() {
  struct sigaction action{};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  sigaction_of_libc()(SIGILL, &action, nullptr);
}

}  // namespace

extern "C" {

// That there is such a function tells csrc/cpu_dispatch.cpp that there are tiles.
void pagedattn_emulates_tiles() {}

// faulthandler of Python would take the place of the handler.
int sigaction(int signal, const struct sigaction* action, struct sigaction* before) noexcept {
  return sigaction_of_libc()(signal, signal == SIGILL ? nullptr : action, before);
}
}
