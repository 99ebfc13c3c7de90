// The device's half of a reduction: a block's first warp directs, the others add.
//
// Additions go through a ring. Each place has two barriers: `full` completes when the first warp
// has described an addition there, and hands over with it all that this warp has observed; `empty`
// completes when all adding warps have done their part. No barrier joins the block's threads, and
// an adding warp continues with the next addition without waiting for the others.
//
// Bytes in flight. The addends come from peers, over a link: with 900 GB/s and two microseconds
// from a load to its value (both estimates), 1.8 MB have to be in flight. Each lane has
// kAddsInFlight loads of 16 bytes, so the 16 adding warps of a block have 64 KiB, and 32 blocks
// have 2 MiB; the default is 64 blocks. Sums are in registers: there is no async proxy.
#pragma once

#include <cstdint>

#include "core/transfer/gradients.hpp"
#include "core/transfer/protocol.hpp"
#include "cuda/device/block.hpp"
#include "cuda/device/config.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/warp.cuh"

namespace uec::cuda {

namespace detail {

inline constexpr int32_t kQuad = 16;  // bytes of a lane's load

UEC_DEVICE float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
UEC_DEVICE uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

// How many numbers a quad holds.
template <GradType kType>
inline constexpr int32_t kOfQuad = kQuad / static_cast<int32_t>(bytes_of(kType));

template <GradType kType>
UEC_DEVICE void widen(const uint4& quad, float* values) {
  const uint32_t words[4] = {quad.x, quad.y, quad.z, quad.w};
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    if constexpr (kType == GradType::kFloat32) {
      values[i] = as_float(words[i]);
    } else {
      values[2 * i] = as_float(words[i] << 16);
      values[2 * i + 1] = as_float(words[i] & 0xFFFF0000);
    }
  }
}

UEC_DEVICE uint32_t narrow(float low, float high) {
  return static_cast<uint32_t>(to_bfloat16(low)) | static_cast<uint32_t>(to_bfloat16(high)) << 16;
}

// Part of an addition is a thread's: of the block's adding warps.
struct Adders {
  UEC_DEVICE static int32_t warp() { return ptx::thread_idx() / ptx::kWarpSize - 1; }
  UEC_DEVICE static int32_t warps() { return ptx::num_threads() / ptx::kWarpSize - 1; }
  UEC_DEVICE static int32_t index() { return ptx::thread_idx() - ptx::kWarpSize; }
  UEC_DEVICE static int32_t size() { return ptx::num_threads() - ptx::kWarpSize; }
};

// `part`: which of the loads that a quad's numbers take in `to`.
template <GradType kTo, int32_t kBytes>
UEC_DEVICE uint4 load_main(const uint8_t* to, int32_t quad, int32_t part) {
  if constexpr (kBytes < kQuad) {
    const uint64_t half = ptx::load_global(reinterpret_cast<const uint64_t*>(to) + quad);
    return {static_cast<uint32_t>(half), static_cast<uint32_t>(half >> 32), 0, 0};
  } else {
    return ptx::load_global(reinterpret_cast<const uint4*>(to) + quad * (kBytes / kQuad) + part);
  }
}

template <GradType kTo, int32_t kNumbers>
UEC_DEVICE void store_sum(uint8_t* to, int32_t quad, const float* sum) {
  constexpr int32_t kPerWord = 4 / static_cast<int32_t>(bytes_of(kTo));
  constexpr int32_t kWords = kNumbers / kPerWord;
  uint32_t words[kWords];
#pragma unroll
  for (int32_t i = 0; i < kWords; ++i) {
    if constexpr (kPerWord == 1)
      words[i] = as_bits(sum[i]);
    else
      words[i] = narrow(sum[2 * i], sum[2 * i + 1]);
  }
  if constexpr (kWords == 2) {
    reinterpret_cast<uint64_t*>(to)[quad] = words[0] | uint64_t{words[1]} << 32;
  } else {
    auto* const at = reinterpret_cast<uint4*>(to) + quad * (kWords / 4);
#pragma unroll
    for (int32_t i = 0; i < kWords; i += 4)
      at[i / 4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
  }
}

template <GradType kFrom>
UEC_DEVICE void accumulate(float* sum, const uint4& quad, bool first) {
  float values[kOfQuad<kFrom>];
  widen<kFrom>(quad, values);
#pragma unroll
  for (int32_t i = 0; i < kOfQuad<kFrom>; ++i)
    sum[i] = first ? values[i] : ptx::add(sum[i], values[i]);
}

// Adds the sum to what is there already (`main_quads`, unless kLoads is 0), and stores it.
template <GradType kTo, int32_t kNumbers, int32_t kLoads>
UEC_DEVICE void finish(uint8_t* to, int32_t quad, float* sum, const uint4* main_quads) {
  if constexpr (kLoads > 0) {
    float values[kLoads * kOfQuad<kTo>];
#pragma unroll
    for (int32_t part = 0; part < kLoads; ++part)
      widen<kTo>(main_quads[part], values + part * kOfQuad<kTo>);
#pragma unroll
    for (int32_t i = 0; i < kNumbers; ++i) sum[i] = ptx::add(values[i], sum[i]);
  }
  store_sum<kTo, kNumbers>(to, quad, sum);
}

// Adds whole rows, a quad per lane; all addresses are aligned to what a lane loads and stores
// there. A warp loads kSources addends of kRows rows before it waits. Without kAll there may be
// more addends, and sums are kept for them. Where fewer rows are left it adds the last one more
// than once, with the same outcome.
template <GradType kFrom, GradType kTo, bool kAdds, int32_t kSources, bool kAll>
UEC_DEVICE_NOINLINE void add_rows(const Addition& addition, int32_t rows) {
  constexpr int32_t kNumbers = kOfQuad<kFrom>;
  constexpr int32_t kToBytes = kNumbers * static_cast<int32_t>(bytes_of(kTo));
  constexpr int32_t kToLoads = !kAdds ? 0 : kToBytes > kQuad ? kToBytes / kQuad : 1;
  constexpr int32_t kRows = kAddsInFlight / (kSources + kToLoads);
  const int32_t n = kAll ? kSources : addition.n;
  const uint8_t* const* const sources = addition.sources;
  uint8_t* const to = addition.to;
#pragma unroll 1
  for (int32_t row = Adders::warp() * kRows; row < rows; row += Adders::warps() * kRows) {
    int32_t quad[kRows];
    float sum[kRows][kNumbers];
    uint4 main_quads[kRows][kToLoads + !kAdds];
#pragma unroll
    for (int32_t r = 0; r < kRows; ++r)
      quad[r] = (row + r < rows ? row + r : rows - 1) * Warp::size() + Warp::index();
#pragma unroll 1
    for (int32_t k = 0; k < n; k += kSources) {
      uint4 quads[kSources][kRows];
#pragma unroll
      for (int32_t i = 0; i < kSources; ++i) {
        if (k + i >= n) break;
        const auto* const from = reinterpret_cast<const uint4*>(sources[k + i]);
#pragma unroll
        for (int32_t r = 0; r < kRows; ++r) quads[i][r] = ptx::load_global(from + quad[r]);
      }
      if (k + kSources >= n) {
#pragma unroll
        for (int32_t r = 0; r < kRows; ++r)
#pragma unroll
          for (int32_t part = 0; part < kToLoads; ++part)
            main_quads[r][part] = load_main<kTo, kToBytes>(to, quad[r], part);
      }
      ptx::sync_warp();  // or the assembler adds before all loads are under way
#pragma unroll
      for (int32_t r = 0; r < kRows; ++r) {
#pragma unroll
        for (int32_t i = 0; i < kSources; ++i) {
          if (k + i >= n) break;
          accumulate<kFrom>(sum[r], quads[i][r], k + i == 0);
        }
        if constexpr (kAll) finish<kTo, kNumbers, kToLoads>(to, quad[r], sum[r], main_quads[r]);
      }
    }
#pragma unroll
    for (int32_t r = 0; r < kRows && !kAll; ++r)
      finish<kTo, kNumbers, kToLoads>(to, quad[r], sum[r], main_quads[r]);
  }
}

UEC_DEVICE float load_number(const uint8_t* from, int64_t i, GradType type) {
  if (type == GradType::kFloat32)
    return as_float(ptx::load_global(reinterpret_cast<const uint32_t*>(from) + i));
  return from_bfloat16(ptx::load_global(reinterpret_cast<const uint16_t*>(from) + i));
}

// What does not fill a row, or is not aligned: a number at a time, kAddsInFlight of them per lane.
UEC_DEVICE_NOINLINE void add_numbers(const Addition& addition, int64_t begin) {
  const GradType from = addition.from, to = addition.type;
  const int64_t end = addition.elements, step = Adders::size();
#pragma unroll 1
  for (int64_t at = begin + Adders::index(); at < end; at += kAddsInFlight * step) {
    float sum[kAddsInFlight], values[kAddsInFlight];
    const int32_t loads = addition.n + (addition.kind == Reduction::kAdd);
#pragma unroll 1
    for (int32_t k = 0; k < loads; ++k) {
      const bool last = k == addition.n;
      const uint8_t* const source = last ? addition.to : addition.sources[k];
#pragma unroll
      for (int32_t i = 0; i < kAddsInFlight; ++i)
        if (at + i * step < end) values[i] = load_number(source, at + i * step, last ? to : from);
#pragma unroll
      for (int32_t i = 0; i < kAddsInFlight; ++i)
        sum[i] = k == 0 ? values[i] : ptx::add(sum[i], values[i]);
    }
#pragma unroll
    for (int32_t i = 0; i < kAddsInFlight; ++i) {
      const int64_t where = at + i * step;
      if (where >= end) continue;
      if (to == GradType::kFloat32)
        reinterpret_cast<uint32_t*>(addition.to)[where] = as_bits(sum[i]);
      else
        reinterpret_cast<uint16_t*>(addition.to)[where] = to_bfloat16(sum[i]);
    }
  }
}

template <class T>
UEC_DEVICE void clear(uint8_t* to, int64_t count) {
#pragma unroll 1
  for (int64_t i = Adders::index(); i < count; i += Adders::size())
    reinterpret_cast<T*>(to)[i] = T{};
}

// Bytewise up to the first quad and after the last one.
UEC_DEVICE_NOINLINE void clear_bytes(uint8_t* to, int64_t bytes) {
  const auto low = static_cast<int64_t>(reinterpret_cast<uint64_t>(to) % kQuad);
  const int64_t ahead = min64(low == 0 ? 0 : kQuad - low, bytes);
  const int64_t quads = (bytes - ahead) / kQuad;
  const int64_t behind = ahead + quads * kQuad;
  clear<uint8_t>(to, ahead);
  clear<uint4>(to + ahead, quads);
  clear<uint8_t>(to + behind, bytes - behind);
}

// How many addends there are is known where most of the time goes: hubs of two replicas, and homes.
template <GradType kFrom, GradType kTo, bool kAdds>
UEC_DEVICE void add_some(const Addition& addition, int32_t rows) {
  constexpr int32_t kFew = kAdds ? 1 : 2;
  constexpr int32_t kToLoads = kAdds ? 1 + (kOfQuad<kFrom> > kOfQuad<kTo>) : 0;
  constexpr int32_t kRows = kFrom == GradType::kFloat32 ? 2 : 1;
  if (addition.n == kFew)
    add_rows<kFrom, kTo, kAdds, kFew, true>(addition, rows);
  else
    // Main gradients take one float32 addend less: there are no registers for it.
    add_rows<kFrom, kTo, kAdds, kAddsInFlight / kRows - kToLoads - (kAdds && kRows == 2), false>(
        addition, rows);
}

template <GradType kFrom>
UEC_DEVICE void add_from(const Addition& addition) {
  const int32_t row = kOfQuad<kFrom> * Warp::size();
  const auto rows = static_cast<int32_t>(addition.aligned ? addition.elements / row : 0);
  if (addition.kind == Reduction::kSum)
    add_some<kFrom, GradType::kFloat32, false>(addition, rows);
  else if (addition.type == GradType::kFloat32)
    add_some<kFrom, GradType::kFloat32, true>(addition, rows);
  else
    add_some<kFrom, GradType::kBFloat16, true>(addition, rows);
  if (int64_t{rows} * row < addition.elements) add_numbers(addition, int64_t{rows} * row);
}

}  // namespace detail

// By one thread, before a block-wide barrier.
UEC_DEVICE void init_additions(AddRing& ring) {
  for (uint32_t i = 0; i < kAdditions; ++i) {
    ptx::mbarrier_init(&ring.full[i], 1);
    ptx::mbarrier_init(&ring.empty[i], static_cast<uint32_t>(detail::Adders::warps()));
  }
  ring.bytes_stored = 0;
}

// The adding warps' loop, until the first warp ends it.
UEC_DEVICE void add_all(AddRing& ring) {
  for (uint32_t k = 0;; ++k) {
    const uint32_t place = k % kAdditions;
    while (!is_complete(ring.full[place], k / kAdditions)) ptx::pause();
    const Addition& addition = ring.additions[place];
    if (addition.elements == 0) return;
    if (addition.kind == Reduction::kZero)
      detail::clear_bytes(addition.to, addition.elements);
    else if (addition.from == GradType::kFloat32)
      detail::add_from<GradType::kFloat32>(addition);
    else
      detail::add_from<GradType::kBFloat16>(addition);
    ptx::sync_warp();
    // Its release is cumulative: what the other lanes have stored, and read, comes before it too.
    if (Warp::leader()) ptx::mbarrier_arrive(&ring.empty[place]);
  }
}

// The first warp's side.
class DeviceAdder : public DeliveryPolicy {
 public:
  // Scratch: `sources` [kAdditions][num_ranks].
  UEC_DEVICE DeviceAdder(AddRing& ring, const uint8_t** sources, int32_t num_ranks)
      : ring_(ring), sources_(sources), num_ranks_(num_ranks) {}

  // Each phase of each place is waited for, also where a later place's says as much: synccheck asks
  // for it.
  UEC_DEVICE bool vacant() const {
    return taken_ < kAdditions ||
           is_complete(ring_.empty[taken_ % kAdditions], taken_ / kAdditions - 1);
  }

  template <class Source>
  UEC_DEVICE void sum(uint8_t* to, int32_t n, Source&& source, int64_t elements, GradType type) {
    take({to, elements, nullptr, n, Reduction::kSum, type, GradType::kFloat32, 0}, source);
  }
  template <class Source>
  UEC_DEVICE void add(uint8_t* main, GradType main_type, int32_t n, Source&& source,
                      int64_t elements, GradType type) {
    take({main, elements, nullptr, n, Reduction::kAdd, type, main_type, 0}, source);
  }
  UEC_DEVICE void zero(uint8_t* to, int64_t bytes) {
    take({to, bytes, nullptr, 0, Reduction::kZero, {}, {}, 0}, [](int32_t) { return nullptr; });
  }
  // Queued behind all additions: the adding warps leave.
  UEC_DEVICE void end() { zero(nullptr, 0); }

  UEC_DEVICE uint32_t ticket() const { return taken_; }

  // Ordinary stores need no wait of their own. This warp's release is cumulative: it publishes not
  // only what it has stored, but all that happened before it, which includes what the adding warps
  // did before they arrived.
  template <class F>
  UEC_DEVICE bool try_delivered(uint32_t ticket, F&& then) {
    if (ticket > done_) {
      if (!is_complete(ring_.empty[(ticket - 1) % kAdditions], (ticket - 1) / kAdditions))
        return false;
      done_ = ticket;
    }
    ptx::sync_warp();
    then(delivered());
    return true;
  }

  // The adding warps have added what they loaded, and this warp comes after their arrivals, which
  // stay behind their loads. The fence is that of DeviceMover::loads_complete().
  UEC_DEVICE void loads_complete() const {
    ptx::sync_warp();
    ptx::fence_system();
  }

 private:
  // Loads of what peers write are not ordered by another lane's acquire alone. The lane that has
  // observed the opening, or the sum's flag, did so at system scope, behind which no cache of this
  // multiprocessor has anything older; and all adding lanes come after it by the barriers of the
  // take (Warp::read_from()), those here, and `full`.
  template <class Source>
  UEC_DEVICE void take(Addition addition, Source&& source) {
    const uint32_t place = taken_ % kAdditions;
    addition.sources = sources_ + place * num_ranks_;
    uint64_t low = reinterpret_cast<uint64_t>(addition.to);
#pragma unroll 1
    for (int32_t i = Warp::index(); i < addition.n; i += Warp::size()) {
      const uint8_t* const at = source(i);
      addition.sources[i] = at;
      low |= reinterpret_cast<uint64_t>(at);
    }
    ptx::sync_warp();
    addition.aligned = ptx::ballot(low % detail::kQuad != 0) == 0;
    if (Warp::leader()) {
      ring_.additions[place] = addition;
      ring_.bytes_stored += static_cast<uint64_t>(
          addition.kind == Reduction::kZero ? addition.elements
                                            : addition.elements * bytes_of(addition.type));
      ptx::mbarrier_arrive(&ring_.full[place]);
    }
    ++taken_;
  }

  AddRing& ring_;
  const uint8_t** sources_;
  int32_t num_ranks_;
  uint32_t taken_ = 0, done_ = 0;  // additions, counted without wrapping
};

}  // namespace uec::cuda
