// What stands between the halves of an FFN: activations as model::config::Activation has them.
#pragma once
#include "common.cuh"

// As device::launch numbers them.
enum Kind { GATED, GATED_BOTH, PLAIN };
enum Activation { RELU, FATRELU, RELU2, SILU, GELU, GELU_TANH };

// Error function as model::config has it: a Chebyshev fit of erfc in f64 (Numerical Recipes 6.2).
__device__ __forceinline__ float error_function(float x) {
    const double z = fabs(double(x)), t = 1.0 / (1.0 + 0.5 * z);
    double fit = 0.17087277;
    fit = fit * t - 0.82215223;
    fit = fit * t + 1.48851587;
    fit = fit * t - 1.13520398;
    fit = fit * t + 0.27886807;
    fit = fit * t - 0.18628806;
    fit = fit * t + 0.09678418;
    fit = fit * t + 0.37409196;
    fit = fit * t + 1.00002368;
    fit = fit * t - 1.26551223;
    const double erfc = t * exp(-z * z + fit);
    return float(x >= 0.0f ? 1.0 - erfc : erfc - 1.0);
}

__device__ __forceinline__ float apply(int activation, float parameter, float x) {
    switch (activation) {
    case RELU: return fmaxf(x, 0.0f);
    case FATRELU: return x > parameter ? x : 0.0f;
    case RELU2: return fmaxf(x, 0.0f) * fmaxf(x, 0.0f);
    case SILU: return x / (1.0f + expf(-x));
    case GELU: return 0.5f * x * (1.0f + error_function(x * 0.70710678f));
    default: return 0.5f * x * (1.0f + tanhf(0.7978846f * (x + 0.044715f * x * x * x)));
    }
}
