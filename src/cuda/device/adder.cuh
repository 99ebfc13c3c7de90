// The device's half of a reduction: the core's Adder, by a warp's ordinary loads and stores.
//
// Bytes in flight. The addends come from peers, over a link: with 900 GB/s and two microseconds
// from a load to its value (both estimates), 1.8 MB have to be in flight. Each lane has
// kAddsInFlight loads of 16 bytes, so a block of kReduceWarps warps has 64 KiB, and 32 blocks have
// 2 MiB; the default is 64 blocks. Sums are in registers: there is no ring of stages, and no async
// proxy.
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

// A warp's loads come one after another: for each row all sources, then what they are added to. A
// row is one quad per lane.
struct RowCursor {
  int32_t load;
  int32_t quad;  // of a source
  UEC_DEVICE void advance(int32_t loads) {
    if (++load < loads) return;
    load = 0;
    quad += Warp::size();
  }
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

// Of whole rows; all addresses are aligned to what a lane loads and stores there.
template <GradType kFrom, GradType kTo>
UEC_APART void add_rows(WarpShared& own, int32_t rows) {
  constexpr int32_t kNumbers = kOfQuad<kFrom>;
  constexpr int32_t kToBytes = kNumbers * static_cast<int32_t>(bytes_of(kTo));
  constexpr int32_t kToLoads = kToBytes > kQuad ? kToBytes / kQuad : 1;
  constexpr int32_t kOfLoad = kNumbers / kToLoads;  // numbers of `to` that a load has
  // Wider numbers in `to` take registers that another load would need.
  constexpr int32_t kTogether = kToLoads == 1 ? kAddsInFlight : kAddsInFlight - 1;
  const int32_t n = own.addition.n, loads = n + (own.addition.adds != 0 ? kToLoads : 0);
  float sum[kNumbers];
  RowCursor at{0, Warp::index()};
#pragma unroll 1
  for (int32_t left = rows * loads; left > 0; left -= kTogether) {
    uint4 quads[kTogether];
    RowCursor next = at;
#pragma unroll
    for (int32_t i = 0; i < kTogether; ++i) {
      if (i >= left) break;
      if (next.load < n)
        quads[i] =
            ptx::load_global(reinterpret_cast<const uint4*>(own.sources()[next.load]) + next.quad);
      else
        quads[i] = load_main<kTo, kToBytes>(own.addition.to, next.quad, next.load - n);
      next.advance(loads);
    }
#pragma unroll
    for (int32_t i = 0; i < kTogether; ++i) {
      if (i >= left) break;
      if (at.load == 0) {
        widen<kFrom>(quads[i], sum);
      } else if (at.load < n) {
        float values[kNumbers];
        widen<kFrom>(quads[i], values);
#pragma unroll
        for (int32_t k = 0; k < kNumbers; ++k) sum[k] = ptx::add(sum[k], values[k]);
      } else {
        float values[kOfQuad<kTo>];
        widen<kTo>(quads[i], values);
        const bool low = kToLoads == 1 || at.load == n;
#pragma unroll
        for (int32_t k = 0; k < kNumbers; ++k)
          if (low == (k < kOfLoad)) sum[k] = ptx::add(values[k % kOfLoad], sum[k]);
      }
      if (at.load + 1 == loads) store_sum<kTo, kNumbers>(own.addition.to, at.quad, sum);
      at.advance(loads);
    }
  }
}

UEC_DEVICE float load_number(const uint8_t* from, int64_t i, GradType type) {
  if (type == GradType::kFloat32)
    return as_float(ptx::load_global(reinterpret_cast<const uint32_t*>(from) + i));
  return from_bfloat16(ptx::load_global(reinterpret_cast<const uint16_t*>(from) + i));
}

// What does not fill a row, or is not aligned: a number at a time, kAddsInFlight of them per lane.
UEC_APART void add_numbers(WarpShared& own, GradType from, GradType to, int64_t begin,
                           int64_t end) {
  const Addition addition = own.addition;
  constexpr int32_t kStep = Warp::size();
#pragma unroll 1
  for (int64_t at = begin + Warp::index(); at < end; at += kAddsInFlight * kStep) {
    float sum[kAddsInFlight], values[kAddsInFlight];
    const int32_t loads = addition.n + addition.adds;
#pragma unroll 1
    for (int32_t k = 0; k < loads; ++k) {
      const bool last = k == addition.n;
      const uint8_t* const source = last ? addition.to : own.sources()[k];
#pragma unroll
      for (int32_t i = 0; i < kAddsInFlight; ++i)
        if (at + i * kStep < end) values[i] = load_number(source, at + i * kStep, last ? to : from);
#pragma unroll
      for (int32_t i = 0; i < kAddsInFlight; ++i)
        sum[i] = k == 0 ? values[i] : ptx::add(sum[i], values[i]);
    }
#pragma unroll
    for (int32_t i = 0; i < kAddsInFlight; ++i) {
      const int64_t where = at + i * kStep;
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
  for (int64_t i = Warp::index(); i < count; i += Warp::size()) reinterpret_cast<T*>(to)[i] = T{};
}

// Bytewise up to the first quad and after the last one.
UEC_APART void clear_bytes(uint8_t* to, int64_t bytes) {
  const auto low = static_cast<int64_t>(reinterpret_cast<uint64_t>(to) % kQuad);
  const int64_t ahead = min64(low == 0 ? 0 : kQuad - low, bytes);
  const int64_t quads = (bytes - ahead) / kQuad;
  const int64_t behind = ahead + quads * kQuad;
  clear<uint8_t>(to, ahead);
  clear<uint4>(to + ahead, quads);
  clear<uint8_t>(to + behind, bytes - behind);
}

// All of an addition. `low`: what this lane knows of the addresses' low bits.
UEC_APART void add_up(WarpShared& own, GradType from, GradType to, uint64_t low, int64_t elements) {
  constexpr GradType kFloat32 = GradType::kFloat32, kBFloat16 = GradType::kBFloat16;
  ptx::sync_warp();
  const bool aligned = ptx::ballot(low % kQuad != 0) == 0;
  const int64_t row = int64_t{kOfQuad<kFloat32>} * Warp::size() << (from == kBFloat16);
  const auto rows = static_cast<int32_t>(aligned ? elements / row : 0);
  if (rows > 0 && from == kFloat32) {
    if (to == kFloat32)
      add_rows<kFloat32, kFloat32>(own, rows);
    else
      add_rows<kFloat32, kBFloat16>(own, rows);
  } else if (rows > 0) {
    if (to == kFloat32)
      add_rows<kBFloat16, kFloat32>(own, rows);
    else
      add_rows<kBFloat16, kBFloat16>(own, rows);
  }
  if (rows * row < elements) add_numbers(own, from, to, rows * row, elements);
}

}  // namespace detail

class DeviceAdder : public DeliveryPolicy {
 public:
  UEC_DEVICE explicit DeviceAdder(WarpShared& own) : own_(own) {}

  template <class Source>
  UEC_DEVICE void sum(uint8_t* to, int32_t n, Source&& source, int64_t elements, GradType type) {
    add_all({to, n, 0}, GradType::kFloat32, source, elements, type);
  }

  template <class Source>
  UEC_DEVICE void add(uint8_t* main, GradType main_type, int32_t n, Source&& source,
                      int64_t elements, GradType type) {
    add_all({main, n, 1}, main_type, source, elements, type);
  }

  UEC_DEVICE void zero(uint8_t* to, int64_t bytes) {
    count(bytes);
    detail::clear_bytes(to, bytes);
  }

  // Ordinary stores need no wait. The leader's release is cumulative: it publishes not only what
  // the leader has stored, but all that happened before it, which includes what the other lanes
  // stored before this barrier.
  template <class F>
  UEC_DEVICE bool when_delivered(F&& then) const {
    ptx::sync_warp();
    then(delivered());
    return true;
  }

  // All lanes have added what they loaded, and this warp comes after other warps' arrivals, which
  // stay behind their loads. The fence is that of DeviceMover::loads_complete().
  UEC_DEVICE void loads_complete() const {
    ptx::sync_warp();
    ptx::fence_system();
  }

 private:
  // Loads of what peers write are not ordered by another lane's acquire alone. The lane that has
  // observed the opening, or the sum's flag, did so at system scope, behind which no cache has
  // anything older; and all lanes come after it by the barriers of the take (Warp::from()), and by
  // those here.
  template <class Source>
  UEC_DEVICE void add_all(const Addition& addition, GradType to, Source& source, int64_t elements,
                          GradType from) {
    ptx::sync_warp();  // all have done with the addition before
    uint64_t low = reinterpret_cast<uint64_t>(addition.to);
#pragma unroll 1
    for (int32_t i = Warp::index(); i < addition.n; i += Warp::size()) {
      const uint8_t* const at = source(i);
      own_.sources()[i] = at;
      low |= reinterpret_cast<uint64_t>(at);
    }
    if (Warp::leader()) own_.addition = addition;
    count(elements * bytes_of(to));
    detail::add_up(own_, from, to, low, elements);
  }

  UEC_DEVICE void count(int64_t bytes) {
    if (Warp::leader()) own_.bytes_stored += static_cast<uint64_t>(bytes);
  }

  WarpShared& own_;
};

}  // namespace uec::cuda
