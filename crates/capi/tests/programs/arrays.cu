/* Kernels for tests and measurements of arrays: every function of array.h. */
#include <onehop/array.h>

struct row64 {
    unsigned int word[64];
};
/* 264 bytes: many rows are in two pages. */
struct row66 {
    unsigned int word[66];
};

/* What array.h needs of a group of cooperative_groups. */
struct whole_block {
    static __device__ unsigned int thread_rank() { return threadIdx.x; }
    static __device__ unsigned int size() { return blockDim.x; }
    static __device__ void sync() { __syncthreads(); }
};
/* `Size` neighbours of a warp. */
template <unsigned int Size> struct tile {
    static __device__ unsigned int thread_rank() { return threadIdx.x % Size; }
    static __device__ unsigned int size() { return Size; }
    static __device__ void sync() { __syncwarp(((1u << (Size - 1) << 1) - 1) << (threadIdx.x % 32 / Size * Size)); }
};

static __device__ unsigned int thread()
{
    return blockIdx.x * blockDim.x + threadIdx.x;
}

/* The part of `n` that one of `parts` has. */
static __device__ void part_of(unsigned int n, unsigned int parts, unsigned int i, unsigned int *first, unsigned int *count)
{
    unsigned int each = (n + parts - 1) / parts;
    *first = each * i < n ? each * i : n;
    *count = n - *first < each ? n - *first : each;
}

template <class Row>
static __device__ void gather_by_blocks(const onehop_array *handle, const unsigned long long *ids, unsigned int n, Row *out,
                                        int *answers)
{
    onehop::array<Row> rows(handle);
    unsigned int first, count;
    part_of(n, gridDim.x, blockIdx.x, &first, &count);
    rows.gather(whole_block(), ids + first, count, out + first, answers + first);
}

extern "C" __global__ void gather64(const onehop_array *array, const unsigned long long *ids, unsigned int n, row64 *out,
                                    int *answers)
{
    gather_by_blocks(array, ids, n, out, answers);
}

extern "C" __global__ void gather66(const onehop_array *array, const unsigned long long *ids, unsigned int n, row66 *out,
                                    int *answers)
{
    gather_by_blocks(array, ids, n, out, answers);
}

/* The same by tiles of eight threads. */
extern "C" __global__ void gather66_by_tiles(const onehop_array *array, const unsigned long long *ids, unsigned int n, row66 *out,
                                             int *answers)
{
    onehop::array<row66> rows(array);
    unsigned int first, count;
    part_of(n, gridDim.x * blockDim.x / 8, thread() / 8, &first, &count);
    rows.gather(tile<8>(), ids + first, count, out + first, answers + first);
}

/* Each thread reads a row by itself. */
extern "C" __global__ void read66(const onehop_array *array, const unsigned long long *ids, unsigned int n, row66 *out, int *answers)
{
    if (thread() < n)
        answers[thread()] = onehop::array<row66>(array).read(ids[thread()], &out[thread()]);
}

/* Each thread writes a row by itself. */
extern "C" __global__ void write66(const onehop_array *array, const unsigned long long *ids, unsigned int n, const row66 *from,
                                   int *answers)
{
    if (thread() < n)
        answers[thread()] = onehop::array<row66>(array).write(ids[thread()], from[thread()]);
}

/* Each thread inverts words in their pages: `each` of them, one after the other. */
extern "C" __global__ void invert(const onehop_array *array, unsigned int n, unsigned int each, int *answers)
{
    onehop::array<unsigned int> words(array);
    int kept = ONEHOP_OK;

    for (unsigned int k = 0; k < each; k++) {
        unsigned int i = k * gridDim.x * blockDim.x + thread();
        if (i >= n)
            break;
        onehop::pin_mut<unsigned int> word(words, i);
        if (word)
            *word = ~*word;
        else if (kept == ONEHOP_OK)
            kept = word.answer();
    }
    answers[thread()] = kept;
}

/* Two pins at once, of rows that may be in one page; `ids` are pairs. */
extern "C" __global__ void two_pins(const onehop_array *array, const unsigned long long *ids, unsigned int n, unsigned int *out,
                                    int *answers)
{
    onehop::array<row64> rows(array);
    unsigned int i = thread();

    if (i >= n)
        return;
    onehop::pin<row64> one(rows, ids[2 * i]), other(rows, ids[2 * i + 1]);
    answers[i] = one ? other.answer() : one.answer();
    if (one && other)
        out[i] = one->word[5] ^ (*other).word[63];
}

/* What each call answers that cannot succeed: answers[0] to [8]. */
extern "C" __global__ void refusals(const onehop_array *array, const onehop_array *none, int *answers)
{
    onehop::array<row66> rows(array), nothing(none);
    onehop_pin at;
    row66 row;
    unsigned long long id = rows.size();

    answers[0] = rows.read(id, &row);
    answers[1] = onehop::pin<row66>(rows, id).answer();
    answers[2] = nothing.read(0, &row);
    answers[3] = nothing.size() == 0 ? onehop_array_unpin(none, &at) : 0;
    answers[4] = onehop_array_pin(array, onehop_array_bytes(array), &at);
    /* Row 15 begins at byte 3960. */
    answers[5] = onehop::pin<row66>(rows, 15).answer();
    answers[6] = onehop::array<unsigned int>(array).write(0, 1);
    answers[7] = onehop_array_pin_cached(array, ~0ull, &at);
    answers[8] = onehop::pin_mut<row66>(nothing, 0).answer();
}

/* Cycles of a gather by one block, for `rounds` of them: the rows of round r begin at ids[r * n]. */
extern "C" __global__ void time64(const onehop_array *array, const unsigned long long *ids, unsigned int n, unsigned int rounds,
                                  row64 *out, unsigned long long *cycles)
{
    onehop::array<row64> rows(array);

    for (unsigned int round = 0; round < rounds; round++) {
        __syncthreads();
        long long start = clock64();
        rows.gather(whole_block(), ids + round * n, n, out);
        if (threadIdx.x == 0)
            cycles[round] = clock64() - start;
    }
}

/* Each thread reads `each` random words by pins of their own; their sum. */
extern "C" __global__ void words(const onehop_array *array, unsigned int each, unsigned int seed, unsigned int *sums)
{
    onehop::array<unsigned int> all(array);
    unsigned int random = (thread() + 1) * 0x9e3779b9u ^ seed, sum = 0, count = all.size();

    for (unsigned int k = 0; k < each; k++) {
        random = random * 1664525u + 1013904223u;
        onehop::pin<unsigned int> word(all, (unsigned long long)random * count >> 32);
        sum += word ? *word : 0x80000000u;
    }
    sums[thread()] = sum;
}
