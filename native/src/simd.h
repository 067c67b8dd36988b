// Vectors of floats, as wide as the registers of the CPU level that this is compiled for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// VECTORS: vectors per row of the micro-kernel. 6 rows of them fill the registers: 32 of AVX-512 and NEON, 16
// otherwise.
#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, VECTORS = 4;
#else
constexpr int LANES = 4, VECTORS = 2;
#endif

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16  // the CPU multiplies bfloat16
#endif

namespace LEVEL {

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Shorts __attribute__((vector_size(LANES * 2)));

constexpr float INF = std::numeric_limits<float>::infinity();

template <class Vector = Floats>
inline Vector load(const void* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

template <class Vector>
inline void store(void* to, Vector x) {
  std::memcpy(to, &x, sizeof x);
}

inline Floats broadcast(float x) { return x - Floats{}; }
inline Ints broadcast(int32_t x) { return x - Ints{}; }

// Return -1 in the lanes whose bit is set, and 0 in the others.
inline Ints lane_mask(uint32_t bits) {
  Ints lane;
  for (int i = 0; i < LANES; ++i) lane[i] = 1 << i;
  return (broadcast(static_cast<int32_t>(bits)) & lane) != 0;
}

constexpr uint32_t ALL_LANES = LANES == 32 ? ~0u : (1u << LANES) - 1;

// Load the lanes whose bit is set, and 0 in the others. Memory of the others is not read: it may not be mapped.
inline Floats load_masked(const float* from, uint32_t bits) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_loadu_ps(static_cast<__mmask16>(bits), from);
#elif defined(__AVX2__)
  return bits == ALL_LANES ? load(from) : (Floats)_mm256_maskload_ps(from, (__m256i)lane_mask(bits));
#else
  if (bits == ALL_LANES) return load(from);
  Floats x{};
  for (int i = 0; i < LANES; ++i)
    if (bits >> i & 1) x[i] = from[i];
  return x;
#endif
}

inline void store_masked(float* to, Floats x, uint32_t bits) {
  if (bits == ALL_LANES) return store(to, x);
#if defined(__AVX2__) && !defined(__AVX512F__)
  return _mm256_maskstore_ps(to, (__m256i)lane_mask(bits), (__m256)x);
#endif
  for (int i = 0; i < LANES; ++i)
    if (bits >> i & 1) to[i] = x[i];
}

// Return the larger value, or `top` if x is NaN: the weights and their sum carry the NaN on.
inline Floats maximum(Floats top, Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)x, (__m512)top);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)x, (__m256)top);
#else
  return x > top ? x : top;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)

// Exchange lanes whose numbers differ by WIDE, a power of 2.
template <int WIDE>
inline Floats exchange(Floats x) {
#if __has_builtin(__builtin_shufflevector)
  return [&]<int... I>(std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, x, (I ^ WIDE)...);
  }(std::make_integer_sequence<int, LANES>());
#else  // g++ 11
  Ints lanes;
  for (int i = 0; i < LANES; ++i) lanes[i] = i ^ WIDE;
  return __builtin_shuffle(x, lanes);
#endif
}

// Reduce all lanes pairwise.
template <class Join>
inline float reduce(Floats x, Join join) {
  if constexpr (LANES == 8) x = join(x, exchange<4>(x));
  x = join(x, exchange<2>(x));
  return join(x, exchange<1>(x))[0];
}

#else

// Reduce all lanes pairwise.
template <class Join>
inline float reduce(Floats x, Join join) {
  for (int wide = LANES / 2; wide; wide /= 2) {
    Floats other{};
    for (int i = 0; i < wide; ++i) other[i] = x[i + wide];
    x = join(x, other);
  }
  return x[0];
}

#endif

inline float reduce_max(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  return reduce(x, maximum);
#endif
}

inline float reduce_sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  return reduce(x, [](Floats a, Floats b) { return a + b; });
#endif
}

// Return 2**r for |r| <= 0.5 by a polynomial, with error 1e-7, or 3e-6 if bfloat16 follows.
template <bool IS_APPROXIMATE>
inline Floats exp2_fraction(Floats r) {
  if (IS_APPROXIMATE) {
    Floats y = r * 9.570101434e-3f + 5.591786028e-2f;
    y = y * r + 2.402474484e-1f;
    y = y * r + 6.931218147e-1f;
    return y * r + 9.999992614e-1f;
  }
  Floats y = r * 1.5403530e-4f + 1.3333558e-3f;
  y = y * r + 9.6181291e-3f;
  y = y * r + 5.5504109e-2f;
  y = y * r + 2.4022651e-1f;
  y = y * r + 6.9314718e-1f;
  return y * r + 1.0f;
}

#if defined(__AVX2__) && !defined(__AVX512F__)

// Return 2**x, and exactly 0 below 2**-125, because products with denormal numbers are slow. NaN stays NaN.
//
// The polynomial gives 2**(r + 1) for |r| <= 0.5 with error 8e-8 before rounding; its factor 2**(n - 1) is 0 for the
// smallest n that the bound leaves, so no comparison is needed.
template <bool IS_APPROXIMATE = false>
inline Floats exp2(Floats x) {
  const Floats magic = broadcast(12582912.0f + 126.0f);  // 1.5 * 2**23 rounds to integers; 126 is the bias less 1
  const Floats bounded = maximum(x, broadcast(-126.0f)), shifted = bounded + magic, r = bounded - (shifted - magic);
  Floats y = r * (2 * 1.32116035e-3f) + 2 * 9.67129320e-3f;
  y = y * r + 2 * 5.55090010e-2f;
  y = y * r + 2 * 2.40222529e-1f;
  y = y * r + 2 * 6.93146884e-1f;
  y = y * r + 2.0f;
  return y * (Floats)((Ints)shifted << 23);
}

#else

// Return 2**x, and exactly 0 below 2**-126, because products with denormal numbers are slow. NaN stays NaN.
template <bool IS_APPROXIMATE = false>
inline Floats exp2(Floats x) {
#if defined(__AVX512F__)
  const __mmask16 is_some = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  const Floats r = (Floats)_mm512_reduce_ps((__m512)x, 0);
  return (Floats)_mm512_maskz_scalef_ps(is_some, (__m512)exp2_fraction<IS_APPROXIMATE>(r), (__m512)(x - r));
#else
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2**23: adding it rounds to integers
  const Floats bounded = x > -126.0f ? x : broadcast(-126.0f);
  const Floats shifted = bounded + magic, r = bounded - (shifted - magic);
  const Floats y = (Floats)((Ints)exp2_fraction<IS_APPROXIMATE>(r) + ((Ints)shifted << 23));
  return x != x ? x : x < -126.0f ? Floats{} : y;
#endif
}

#endif

// Round to bfloat16, to nearest, ties to even.
inline Shorts round_to_bf16(Floats x) {
  const Words bits = (Words)x, even = bits + 0x7FFF + (bits >> 16 & 1);
  return __builtin_convertvector((x != x ? bits | 0x400000 : even) >> 16, Shorts);
}

// Round to bfloat16 by one instruction where there is one; it may turn denormal numbers into 0.
inline Shorts to_bf16(Floats x) {
#if defined(__AVX512BF16__)
  return (Shorts)_mm512_cvtneps_pbh((__m512)x);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  return (Shorts)vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)x));
#else
  return round_to_bf16(x);
#endif
}

}  // namespace LEVEL
