#!/bin/bash
# Packs the GPU tests and the onehop binary for a machine with a GPU, which needs neither Rust, the CUDA toolkit nor QEMU.
set -euo pipefail

usage() {
    cat <<'TEXT'
bed/cuda.sh pack DIR   builds the tests and the binary, and packs them into DIR with this script, QEMU and compute-sanitizer
DIR/cuda.sh run        on the GPU machine: runs all of it; each part has a time limit
DIR/cuda.sh sanitize   there: runs every kernel under compute-sanitizer (memcheck, racecheck, synccheck), with less work

Both exit with 1 if a test or a required transfer fails. The log is DIR/log or DIR/sanitizer-log. Without a GPU, tests use
the emulated one or say that they were skipped.
TEXT
}

# crate, test: each becomes the program test-NAME.
tests=(
    "onehop-gpu cuda"
    "onehop-array on_gpus"
    "onehop-bench gpu"
    "onehop-drive drive"
)

pack() {
    local dir=$1 crate name built
    cd "$(dirname "$0")/.."
    mkdir -p "$dir"
    cargo build --release -p onehop
    strip -o "$dir/onehop" "${CARGO_TARGET_DIR:-target}/release/onehop"
    for test in "${tests[@]}"; do
        read -r crate name <<<"$test"
        built=$(cargo test --release -p "$crate" --test "$name" --no-run 2>&1 | tee /dev/stderr |
            sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
        strip -o "$dir/test-$name" "$built"
    done
    cargo build --release -p onehop-transfer --example long_load
    strip -o "$dir/long_load" "${CARGO_TARGET_DIR:-target}/release/examples/long_load"
    cp bed/cuda.sh "$dir"
    kernels "$dir"
    pack_sanitizer "$dir"
    if command -v qemu-system-x86_64 >/dev/null; then
        pack_qemu "$dir"
    else
        echo "there is no QEMU here: its tests will be skipped there"
    fi
    du -sh "$dir"
    echo "now run $dir/cuda.sh run there"
}

# QEMU with everything it needs to model a drive: its libraries and their loader, its one accelerator that needs no
# privileges, and the firmware without which it does not start, although no CPU ever runs it.
pack_qemu() {
    local dir=$1 work program file
    work=$(mktemp -d)
    mkdir -p "$work/qemu/lib" "$work/qemu/modules" "$work/qemu/firmware"
    program=$(readlink -f "$(command -v qemu-system-x86_64)")
    strip -o "$work/qemu/program" "$program"
    ldd "$program" | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }' |
        while read -r file; do strip -o "$work/qemu/lib/$(basename "$file")" "$file"; done
    for file in /usr/lib/*/qemu/accel-tcg-x86_64.so /usr/lib/qemu/accel-tcg-x86_64.so; do
        [ ! -e "$file" ] || cp "$file" "$work/qemu/modules"
    done
    for file in /usr/share/qemu/kvmvapic.bin /usr/share/seabios/bios-256k.bin /usr/share/qemu/bios-256k.bin; do
        [ ! -e "$file" ] || cp -L "$file" "$work/qemu/firmware"
    done
    cat >"$work/qemu/qemu-system-x86_64" <<'TEXT'
#!/bin/sh
here=$(dirname "$0")
export QEMU_MODULE_DIR="$here/modules"
exec "$here/lib/ld-linux-x86-64.so.2" --library-path "$here/lib" "$here/program" -L "$here/firmware" "$@"
TEXT
    chmod +x "$work/qemu/qemu-system-x86_64"
    tar -C "$work" -czf "$dir/qemu.tgz" qemu
    rm -rf "$work"
}

# Third-party kernels: their tests, and the example in C++. A driver links PTX of its own CUDA version or older, so the
# kernels are compiled by a compiler that is not the newest.
kernels() {
    local dir=$1 target=${CARGO_TARGET_DIR:-target} nvrtc file test
    nvrtc=$target/nvrtc/nvidia/cuda_nvrtc/lib
    [ -f "$nvrtc/libnvrtc.so.12" ] ||
        python3 -m pip install --quiet --no-deps --target "$target/nvrtc" nvidia-cuda-nvrtc-cu12==12.9.86
    for file in examples/cuda/pointer_chase crates/capi/tests/programs/calls crates/capi/tests/programs/arrays; do
        LD_LIBRARY_PATH=$nvrtc examples/cuda/nvrtc.py $file.cu -o "$dir/${file##*/}.ptx" --nvrtc "$nvrtc/libnvrtc.so.12"
    done
    cp crates/device/ptx/pointer_chase.ptx "$dir/pointer_chase.rust.ptx"
    examples/cuda/build "$target/cuda-example" >/dev/null
    strip -o "$dir/pointer_chase" "$target/cuda-example/pointer_chase"
    strip -o "$dir/libonehop.so" "$target/cuda-example/libonehop.so"
    test=$(cargo test --release -p onehop-capi --test cuda --no-run 2>&1 | sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
    strip -o "$dir/kernels-test" "$test"
}

# The 64-bit parts of NVIDIA's package.
pack_sanitizer() {
    local dir=$1 from=${CARGO_TARGET_DIR:-target}/sanitizer
    [ -d "$from" ] || python3 -m pip install --quiet --no-deps --target "$from" nvidia-cuda-sanitizer-api==13.5.25
    tar -C "$from/nvidia/cu13" --exclude={docs,include,x86} -cJf "$dir/sanitizer.txz" compute-sanitizer
}

failed=0
# Seconds that all of it may take.
budget=${ONEHOP_BUDGET:-600}
# A command that should succeed within so many seconds; what it said is in the log.
expect() {
    attempt "$@" || failed=1
}

# The same, where a failure is not the end of it: 124 without any time left.
attempt() {
    local seconds=$1 begun=$SECONDS status=0
    shift
    echo "== $*"
    # A filter that no test matches would pass.
    if [[ $1 == ./test-* ]] && ! "$@" --list 2>/dev/null | grep -q ': test$'; then
        echo "FAILED: there is no such test"
        return 1
    fi
    [ "$seconds" -lt $((budget - SECONDS)) ] || seconds=$((budget - SECONDS))
    if [ "$seconds" -le 0 ]; then
        echo "FAILED: no time was left for it"
        return 124
    fi
    timeout -k 5 "$seconds" "$@" || status=$?
    [ $status -eq 0 ] || echo "FAILED: $* (status $status)"
    echo "-- $((SECONDS - begun)) s"
    return $status
}

# QEMU shares its guest's memory with the GPU, so it must be a file in memory.
prepare_qemu() {
    if command -v qemu-system-x86_64 >/dev/null || [ ! -e qemu.tgz ]; then
        return
    fi
    [ -d qemu ] || tar xzf qemu.tgz
    PATH=$PWD/qemu:$PATH
    qemu-system-x86_64 --version | head -n 1 || true
    if [ "$(df --output=avail -k /dev/shm | tail -n 1)" -lt $((4 << 20)) ]; then
        mount -o remount,size=8G /dev/shm || echo "/dev/shm is small: QEMU's tests may not find room there"
    fi
}

demos() {
    expect 60 ./onehop demo
    expect 60 ./onehop demo -g 0 --route cpu/pinned
    for mode in "--queues 1" "--queues 4 --depth 256" "--mode shared --threads 32" "--mode shared --threads 1000"; do
        # shellcheck disable=SC2086
        expect 60 ./onehop demo -g 0 --route gpu/tier1 --size 64M $mode
    done
    for fault in late@op=read,n=4,delay=20ms lost@op=read,n=5 fail-once@op=read,n=3 reorder@op=read,n=2,count=30; do
        expect 60 ./onehop demo -g 0 --route gpu/tier1 --fault "$fault"
        expect 60 ./onehop demo -g 0 --route gpu/tier1 --mode shared --fault "$fault"
    done
}

kernels_of_others() {
    expect 60 env ONEHOP_TEST_KERNELS=. ./kernels-test --test-threads=1
    expect 30 ./pointer_chase sim:mem:64M 0 pointer_chase.ptx
    expect 30 ./pointer_chase sim:mem:64M 0 pointer_chase.rust.ptx
    expect 30 ./pointer_chase 'sim:mem:64M?lba=4096&fault=lost@op=read,n=3000' 0 pointer_chase.ptx
}

checks() {
    uname -a
    prepare_qemu
    # Kernels that work together must not be loaded one after another.
    export CUDA_MODULE_LOADING=EAGER
    if nvidia-smi --query-gpu=name,driver_version,pci.bus_id,memory.total --format=csv; then
        export ONEHOP_TEST_GPU=0
        demos
        kernels_of_others
    else
        echo "SKIPPED: there is no NVIDIA GPU here; the tests run on the emulated one"
    fi
    export RUST_BACKTRACE=0 ONEHOP_TORTURE_OPS=${ONEHOP_TORTURE_OPS:-500000}
    expect 120 ./test-cuda --test-threads=1
    echo "= (a) a simulated drive on CPU threads"
    expect 90 ./test-drive --test-threads=4 sim_matrix::
    expect 90 ./test-drive --test-threads=1 --nocapture every_fault_in_every_mode
    expect 90 ./test-drive --test-threads=1 --nocapture torture:: --skip on_the_gpu
    echo "= (b) the controller model on the GPU itself"
    expect 90 ./test-drive --test-threads=1 resident_matrix::
    expect 300 ./test-drive --test-threads=1 --nocapture every_fault_on_the_gpu
    expect 90 ./test-drive --test-threads=1 --nocapture operations_with_faults_on_the_gpu
    expect 120 ./test-on_gpus --test-threads=1 --nocapture
    expect 120 ./test-gpu --test-threads=1 --nocapture
    if [ -n "${ONEHOP_TEST_GPU:-}" ]; then
        expect 60 ./long_load 0 2 128 4
    fi
    echo "= (c) QEMU's drive"
    expect 90 ./test-drive --test-threads=4 qtest_matrix::
    echo "$SECONDS s in all, $([ $failed -eq 0 ] && echo "nothing failed" || echo "something FAILED")"
}

# A program under the tool, which ends with 9 where it has found something. Now and then the tool holds a launch back until
# a controller on the GPU has ended; the program fails then, and is tried again.
sanitized() {
    local tool=$1 status try
    shift
    for try in 1 2 3; do
        # It does not know attributes that older drivers lack.
        attempt 120 compute-sanitizer/compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no "$@" && return
        status=$?
        [ $status -ne 9 ] || break
        echo "try $try failed by itself: the tool has found nothing"
    done
    failed=1
}

# Kernels of the queues, arrays, the rig, checksums and registers, samples, and those linked with third-party code.
sanitize() {
    local tool test mode
    if ! nvidia-smi --query-gpu=name,driver_version --format=csv; then
        echo "FAILED: there is no NVIDIA GPU here"
        failed=1
        return
    fi
    [ -d compute-sanitizer ] || tar xJf sanitizer.txz
    compute-sanitizer/compute-sanitizer --version | tail -n 1
    export CUDA_MODULE_LOADING=EAGER ONEHOP_TEST_GPU=0 ONEHOP_TEST_KERNELS=. RUST_BACKTRACE=0
    # The sanitizer holds a second launch back until the first has ended: controllers on the GPU end by themselves.
    export ONEHOP_GPU_ITEMS=512 ONEHOP_GPU_COMMANDS=1024 ONEHOP_GPU_SECONDS=4 ONEHOP_GPU_QUEUES=2
    export ONEHOP_GPU_RANGES=40 ONEHOP_GPU_MIB=16
    for tool in memcheck racecheck synccheck; do
        # Under racecheck, threads of one warp deadlock (observed with 13.5.25).
        if [ $tool = racecheck ]; then export ONEHOP_GPU_UNFAIR=1; else unset ONEHOP_GPU_UNFAIR; fi
        for test in every_kernel_once many_commands each_of_the_kernels_ends_by_itself; do
            sanitized $tool ./test-gpu --test-threads=1 $test
        done
        sanitized $tool ./test-cuda --test-threads=1 sums:: registers_are_read_one_by_one marks_
        sanitized $tool ./test-on_gpus --test-threads=1 every_kernel_once
        sanitized $tool ./kernels-test --test-threads=1 every_call_is_answered pointers_are_chased
        # Lanes of a gather wait for each other, and would starve under racecheck. They share no memory that it watches.
        [ $tool = racecheck ] || sanitized $tool ./kernels-test --test-threads=1 rows_are_right what_cannot_be
        for mode in --queues=1 --mode=shared --depth=1; do
            sanitized $tool ./onehop demo -g 0 --route gpu/tier1 --size 1M $mode
        done
        sanitized $tool ./onehop sdr selftest -g 0 --buffer 64K --device 'sim:usdr?signal=counter&rate=10M&patient=1'
        sanitized $tool ./onehop sdr rx -g 0 --device 'sim:usdr?signal=tone&rate=10M&patient=1' --seconds 0.2
    done
    echo "$SECONDS s in all, $([ $failed -eq 0 ] && echo "nothing was found" || echo "something FAILED")"
}

case ${1:-} in
pack)
    [ $# -eq 2 ] || { usage >&2; exit 2; }
    pack "$(realpath -m "$2")"
    ;;
run)
    cd "$(dirname "$0")"
    # The tests' file must be on a disk's file system.
    checks > >(tee log) 2>&1
    [ $failed -eq 0 ]
    ;;
sanitize)
    cd "$(dirname "$0")"
    sanitize > >(tee sanitizer-log) 2>&1
    [ $failed -eq 0 ]
    ;;
*)
    usage >&2
    exit 2
    ;;
esac
