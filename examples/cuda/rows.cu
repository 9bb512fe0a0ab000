/* Rows of an array on a drive, in three ways (docs/gpu-kernels.md). */
#include <cooperative_groups.h>
#include <onehop/array.h>

struct Row {
    float values[64];
};

/* The sums of rows: a block copies 256 of them to fast memory together. The first error of a row ends up in `failed`. */
extern "C" __global__ void sums(const onehop_array *handle, const unsigned long long *ids, unsigned int n, Row *copies, float *sums,
                                int *failed)
{
    onehop::array<Row> rows(handle);
    unsigned int first = blockIdx.x * blockDim.x, i = first + threadIdx.x;
    if (first >= n)
        return;
    unsigned int count = n - first < blockDim.x ? n - first : blockDim.x;
    int answer = rows.gather(cooperative_groups::this_thread_block(), ids + first, count, copies + first);
    if (answer != ONEHOP_OK)
        atomicCAS(failed, 0, answer);
    if (i < n) {
        float sum = 0;
        for (float value : copies[i].values)
            sum += value;
        sums[i] = sum;
    }
}

/* The same for a few rows by a part of a warp. */
extern "C" __global__ void sums_by_tiles(const onehop_array *handle, const unsigned long long *ids, Row *copies, int *failed)
{
    auto tile = cooperative_groups::tiled_partition<16>(cooperative_groups::this_thread_block());
    unsigned int first = (blockIdx.x * blockDim.x / 16 + tile.meta_group_rank()) * 16;
    int answer = onehop::array<Row>(handle).gather(tile, ids + first, 16, copies + first);
    if (answer != ONEHOP_OK)
        atomicCAS(failed, 0, answer);
}

/* Row `to` becomes the sum of two others, in place; each thread does one. A thread with several pins can wait for threads that wait
 * for it: the rows that are only read are copied. */
extern "C" __global__ void add(const onehop_array *handle, const unsigned long long *ids, unsigned int n, int *answers)
{
    onehop::array<Row> rows(handle);
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    Row one, other;

    if (i >= n)
        return;
    int answer = rows.read(ids[3 * i], &one);
    if (answer == ONEHOP_OK)
        answer = rows.read(ids[3 * i + 1], &other);
    if (answer == ONEHOP_OK) {
        onehop::pin_mut<Row> to(rows, ids[3 * i + 2]);
        answer = to.answer();
        if (to)
            for (unsigned int k = 0; k < 64; k++)
                to->values[k] = one.values[k] + other.values[k];
    }
    answers[i] = answer;
}
