// What instructions compute from registers.
#include <bit>

#include "machine.hpp"

namespace ptx_machine {
namespace {

float as_float(uint64_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits)); }
uint64_t bits_of(float v) { return std::bit_cast<uint32_t>(v); }
double as_double(uint64_t bits) { return std::bit_cast<double>(bits); }

uint64_t multiply_high(uint64_t a, uint64_t b, bool is_signed, int bytes) {
  if (bytes == 8 && is_signed)
    return static_cast<uint64_t>(
        (static_cast<__int128>(static_cast<int64_t>(a)) * static_cast<int64_t>(b)) >> 64);
  if (bytes == 8) return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
  if (is_signed)
    return static_cast<uint64_t>((sign_extend(a, bytes) * sign_extend(b, bytes)) >> (8 * bytes));
  return (a * b) >> (8 * bytes);
}

uint64_t divide(uint64_t a, uint64_t b, bool is_signed, bool rest, int bytes) {
  if (!is_signed) return rest ? a % b : a / b;
  const int64_t x = sign_extend(a, bytes), y = sign_extend(b, bytes);
  if (y == -1) return rest ? 0 : -a;
  return static_cast<uint64_t>(rest ? x % y : x / y);
}

bool compare(Comparison how, uint64_t a, uint64_t b, bool is_signed, int bytes) {
  if (how == kEq) return a == b;
  if (how == kNe) return a != b;
  const auto [x, y] = is_signed ? std::pair(sign_extend(a, bytes), sign_extend(b, bytes))
                                : std::pair(static_cast<int64_t>(a ^ uint64_t{1} << 63),
                                            static_cast<int64_t>(b ^ uint64_t{1} << 63));
  return how == kLt ? x < y : how == kLe ? x <= y : how == kGt ? x > y : x >= y;
}

bool compare_floats(Comparison how, double x, double y) {
  switch (how) {
    case kEq:
      return x == y;
    case kNe:
      return x < y || x > y;
    case kLt:
      return x < y;
    case kLe:
      return x <= y;
    case kGt:
      return x > y;
    default:
      return x >= y;
  }
}

uint64_t insert_bits(uint64_t field, uint64_t into, uint64_t at, uint64_t length, int bytes) {
  at &= 255;
  length &= 255;
  if (at >= static_cast<uint64_t>(8 * bytes) || length == 0) return into;
  const uint64_t mask = (length >= 64 ? ~uint64_t{0} : (uint64_t{1} << length) - 1) << at;
  return (into & ~mask) | ((field << at) & mask);
}

uint64_t shift(uint64_t a, uint64_t by, bool left, bool is_signed, int bytes) {
  const auto bits = static_cast<uint64_t>(8 * bytes);
  by &= 0xFFFFFFFF;
  if (left) return by >= bits ? 0 : a << by;
  if (is_signed) return static_cast<uint64_t>(sign_extend(a, bytes) >> std::min(by, bits - 1));
  return by >= bits ? 0 : a >> by;
}

uint64_t reverse(uint64_t a, int bytes) {
  uint64_t v = 0;
  for (int k = 0; k < 8 * bytes; ++k) v |= (a >> k & 1) << (8 * bytes - 1 - k);
  return v;
}

}  // namespace

uint64_t Machine::special(Warp& w, int lane, uint64_t which, uint32_t pc) {
  const Block& block = *w.block;
  const Grid& grid = *block.grid;
  switch (which) {
    case kZero:
      return 0;
    case kOne:
      return 1;
    case kThread:
      return w.in_block * 32 + static_cast<uint32_t>(lane);
    case kThreads:
      return grid.threads;
    case kBlockX:
      return block.x;
    case kBlockY:
      return block.y;
    case kBlocksX:
      return grid.blocks_x;
    case kBlocksY:
      return grid.blocks_y;
    case kLane:
      return static_cast<uint64_t>(lane);
    case kWarp:
      return w.in_block;
    case kLanesBelow:
      return (uint64_t{1} << lane) - 1;
    case kProcessor:
      return block.id;
    case kClusterRank:
      return block.cluster_rank;
    case kClusterBlocks:
      return block.cluster->blocks.size();
    case kClusterX:
      return block.x / block.cluster->blocks.size();
    case kClock:
      return options_.timed() ? w.now : steps_;
    case kGlobalTimer: {
      // Without costs, of the steps taken so far and not of the day: the same in every run.
      constexpr uint64_t kStart = 1'000'000;
      if (!options_.timed()) return kStart + elapsed_ns_;
      return kStart + static_cast<uint64_t>(costs_.nanoseconds(w.now));
    }
    default:
      trap("a special register that is not modelled: " + where(pc));
  }
}

uint64_t Machine::value(Warp& w, int lane, const Operand& o, uint32_t pc) {
  Frame& f = *w.frame[lane];
  switch (o.kind) {
    case Kind::kRegister:
      return f.registers[o.index * 32 + lane] + o.value;  // [%register+offset] of a bulk copy
    case Kind::kImmediate:
      return o.value;
    case Kind::kPredicate:
      return ((f.predicates[o.index] >> lane & 1) != 0) != o.negated ? 1 : 0;
    case Kind::kEntryParam:
      return reinterpret_cast<uint64_t>(w.block->grid->params.data()) + o.value;
    case Kind::kLocal:
      return reinterpret_cast<uint64_t>(f.local + int64_t{lane} * f.local_stride) + o.value;
    case Kind::kShared:
      return kWindow + (o.index < 0 ? module_.dynamic_shared_at() : o.index) + o.value;
    case Kind::kSpecial:
      return special(w, lane, o.value, pc);
    default:
      trap("an operand that is not modelled: " + where(pc));
  }
}

Values Machine::values(Warp& w, Frame& f, uint32_t lanes, const Operand& o, uint32_t pc) {
  Values v;
  if (o.kind == Kind::kRegister) {
    const uint64_t* const row = &f.registers[o.index * 32];
    for (int l = 0; l < 32; ++l) v[l] = row[l] + o.value;
  } else if (o.kind == Kind::kImmediate) {
    v.fill(o.value);
  } else if (o.kind == Kind::kPredicate) {
    const uint32_t bits = o.negated ? ~f.predicates[o.index] : f.predicates[o.index];
    for (int l = 0; l < 32; ++l) v[l] = bits >> l & 1;
  } else {
    each_lane(lanes, [&](int l) { v[l] = value(w, l, o, pc); });
  }
  return v;
}

void Machine::put(Frame& f, int lane, const Operand& o, uint64_t v) {
  if (o.kind == Kind::kRegister)
    f.registers[o.index * 32 + lane] = v & mask_of(o.width);
  else if (o.kind == Kind::kPredicate)
    f.predicates[o.index] = (f.predicates[o.index] & ~(1u << lane)) | static_cast<uint32_t>(v & 1)
                                                                          << lane;
}

void Machine::compute(Warp& w, Frame& f, const Instruction& i, uint32_t lanes, uint32_t pc) {
  const int bytes = bytes_of(i.type);
  const uint64_t mask = bytes == 0 ? 1 : mask_of(bytes);  // of a predicate
  const bool is_signed = ptx_machine::is_signed(i.type);
  const auto unknown = [&] [[noreturn]] { trap("not modelled: " + where(pc)); };
  const auto from = [&](int k) { return values(w, f, lanes, i.from_operand[k], pc); };
  // `fn` returns a lane's result.
  const auto put_at = [&](const Operand& to, auto&& fn) {
    if (to.kind == Kind::kRegister) {
      uint64_t* const row = &f.registers[to.index * 32];
      const uint64_t kept = mask_of(to.width);
      each_lane(lanes, [&](int l) { row[l] = fn(l) & kept; });
    } else if (to.kind == Kind::kPredicate) {
      uint32_t bits = f.predicates[to.index] & ~lanes;
      each_lane(lanes, [&](int l) { bits |= static_cast<uint32_t>(fn(l) & 1) << l; });
      f.predicates[to.index] = bits;
    }
  };
  const auto put_each = [&](auto&& fn) { put_at(i.to[0], fn); };
  // `fn` takes as many values as it has parameters, cut to the instruction's type.
  const auto each = [&](auto&& fn) {
    const Values a = from(0);
    if constexpr (std::is_invocable_v<decltype(fn), uint64_t>) {
      put_each([&](int l) { return fn(a[l] & mask); });
    } else {
      const Values b = from(1);
      if constexpr (std::is_invocable_v<decltype(fn), uint64_t, uint64_t>) {
        put_each([&](int l) { return fn(a[l] & mask, b[l] & mask); });
      } else {
        const Values c = from(2);
        put_each([&](int l) { return fn(a[l] & mask, b[l] & mask, c[l]); });
      }
    }
  };
  const auto integers = [&](auto&& fn) {
    if (is_float(i.type)) unknown();
    each([&](uint64_t a, uint64_t b) { return fn(a, b) & mask; });
  };
  // Of floats too, where the operation has the same name.
  const auto numbers = [&](auto&& fn) {
    if (i.type == Type::kF32)
      each([&](uint64_t a, uint64_t b) { return bits_of(fn(as_float(a), as_float(b))); });
    else if (i.type == Type::kF64)
      each([&](uint64_t a, uint64_t b) {
        return std::bit_cast<uint64_t>(fn(as_double(a), as_double(b)));
      });
    else
      each([&](uint64_t a, uint64_t b) { return fn(a, b) & mask; });
  };
  switch (i.op) {
    case Op::kMov: {
      const Values a = from(0);
      return put_each([&](int l) { return a[l]; });
    }
    case Op::kMovVector: {
      const int n = std::max(i.num_to, i.num_from), part = bytes / n;
      Values v = {};
      for (int k = 0; k < i.num_from; ++k) {
        const Values a = from(k);
        const uint64_t kept = i.num_to == 1 ? mask_of(part) : ~uint64_t{0};
        for (int l = 0; l < 32; ++l) v[l] |= (a[l] & kept) << (8 * part * k);
      }
      if (i.num_to == 1) return put_each([&](int l) { return v[l]; });
      for (int k = 0; k < n; ++k)
        put_at(i.to[k], [&](int l) { return v[l] >> (8 * part * k) & mask_of(part); });
      return;
    }
    case Op::kAdd:
      return numbers([](auto a, auto b) { return a + b; });
    case Op::kSub:
      return numbers([](auto a, auto b) { return a - b; });
    case Op::kMulLow:
      return numbers([](auto a, auto b) { return a * b; });
    case Op::kMulHigh:
      return integers(
          [&](uint64_t a, uint64_t b) { return multiply_high(a, b, is_signed, bytes); });
    case Op::kMulWide:
    case Op::kMadWide: {
      const Values a = from(0), b = from(1), c = i.op == Op::kMadWide ? from(2) : Values{};
      return put_each([&](int l) {
        const uint64_t x = a[l] & mask, y = b[l] & mask;
        return c[l] + (is_signed
                           ? static_cast<uint64_t>(sign_extend(x, bytes) * sign_extend(y, bytes))
                           : x * y);
      });
    }
    case Op::kMadLow:
      return each([&](uint64_t a, uint64_t b, uint64_t c) { return (a * b + c) & mask; });
    case Op::kDiv:
    case Op::kRem:
      return integers([&](uint64_t a, uint64_t b) {
        if (b != 0) return divide(a, b, is_signed, i.op == Op::kRem, bytes);
        violate("a division by zero: " + where(pc));
        return mask;
      });
    case Op::kMin:
    case Op::kMax:
      return integers([&](uint64_t a, uint64_t b) {
        return compare(kLt, a, b, is_signed, bytes) == (i.op == Op::kMin) ? a : b;
      });
    case Op::kNeg:
      if (is_float(i.type)) unknown();
      return each([&](uint64_t a) { return -a & mask; });
    case Op::kAbs:
      if (is_float(i.type)) unknown();
      return each([&](uint64_t a) { return sign_extend(a, bytes) < 0 ? -a & mask : a; });
    case Op::kAnd:
      return integers([](uint64_t a, uint64_t b) { return a & b; });
    case Op::kOr:
      return integers([](uint64_t a, uint64_t b) { return a | b; });
    case Op::kXor:
      return integers([](uint64_t a, uint64_t b) { return a ^ b; });
    case Op::kNot:
      return each([&](uint64_t a) { return ~a & mask; });
    case Op::kShl:
    case Op::kShr:
      return integers(
          [&](uint64_t a, uint64_t b) { return shift(a, b, i.op == Op::kShl, is_signed, bytes); });
    case Op::kBitInsert: {
      const Values a = from(0), b = from(1), c = from(2), d = from(3);
      return put_each(
          [&](int l) { return insert_bits(a[l], b[l] & mask, c[l], d[l], bytes) & mask; });
    }
    case Op::kBitReverse:
      return each([&](uint64_t a) { return reverse(a, bytes); });
    case Op::kDotBytes:
      if (!is_signed || i.from != i.type) unknown();
      return each([&](uint64_t a, uint64_t b, uint64_t c) {
        for (int k = 0; k < 32; k += 8)
          c += static_cast<uint64_t>(sign_extend(a >> k & 0xFF, 1) * sign_extend(b >> k & 0xFF, 1));
        return c & mask;
      });
    case Op::kFindTop:
      if (is_signed) unknown();
      return each([&](uint64_t a) -> uint64_t {
        if (a == 0) return 0xFFFFFFFF;
        const uint64_t top = 63 - std::countl_zero(a);
        return i.mode != 0 ? 8 * bytes - 1 - top : top;
      });
    case Op::kPopCount:
      return each([](uint64_t a) { return static_cast<uint64_t>(std::popcount(a)); });
    case Op::kLeadingZeros:
      return each([&](uint64_t a) {
        return static_cast<uint64_t>(std::countl_zero(a) - (64 - 8 * bytes));
      });
    case Op::kCompare: {
      const auto how = static_cast<Comparison>(i.mode);
      if (i.type == Type::kF32)
        return each([&](uint64_t a, uint64_t b) -> uint64_t {
          return compare_floats(how, as_float(a), as_float(b));
        });
      if (i.type == Type::kF64)
        return each([&](uint64_t a, uint64_t b) -> uint64_t {
          return compare_floats(how, as_double(a), as_double(b));
        });
      return each(
          [&](uint64_t a, uint64_t b) -> uint64_t { return compare(how, a, b, is_signed, bytes); });
    }
    case Op::kSelect:
      return each([&](uint64_t a, uint64_t b, uint64_t choice) { return choice != 0 ? a : b; });
    case Op::kConvert: {  // to .type from .from
      const int width = bytes_of(i.from);
      const bool from_signed = ptx_machine::is_signed(i.from);
      const Values given = from(0);
      if (i.type == Type::kF64 && i.from == Type::kU64)
        return put_each(
            [&](int l) { return std::bit_cast<uint64_t>(static_cast<double>(given[l])); });
      if (is_float(i.type) || is_float(i.from)) unknown();
      return put_each([&](int l) {
        const uint64_t a = given[l] & mask_of(width);
        const uint64_t wide = from_signed ? static_cast<uint64_t>(sign_extend(a, width)) : a;
        return is_signed ? static_cast<uint64_t>(sign_extend(wide & mask, bytes)) : wide & mask;
      });
    }
    case Op::kConvertAddress:
      return each_lane(lanes, [&](int l) {
        const uint64_t base = reinterpret_cast<uint64_t>(w.block->shared) - kWindow;
        uint64_t v = value(w, l, i.from_operand[0], pc);
        if (i.space == Space::kCluster) unknown();
        if (i.space == Space::kShared) v = i.to_space ? v - base : v + base;
        put(f, l, i.to[0], v);
      });
    case Op::kMapAddress:  // the same place in another block of the cluster
      if (i.space != Space::kCluster) unknown();
      return each_lane(lanes, [&](int l) {
        const uint64_t rank = value(w, l, i.from_operand[1], pc);
        put(f, l, i.to[0], value(w, l, i.from_operand[0], pc) % (1 << 24) | (rank + 1) << 24);
      });
    case Op::kBlockOfAddress:
      if (i.space != Space::kCluster) unknown();
      return each_lane(lanes, [&](int l) {
        const uint64_t rank = value(w, l, i.from_operand[0], pc) >> 24;
        put(f, l, i.to[0], rank == 0 ? w.block->cluster_rank : rank - 1);
      });
    case Op::kActiveMask:
      return each_lane(lanes, [&](int l) { put(f, l, i.to[0], lanes); });
    default:
      unknown();
  }
}

}  // namespace ptx_machine
