#!/bin/bash
# Starts QEMU's NVMe model without a guest, for drives named qtest:SOCKET,MEMORY-FILE. Needs neither root nor KVM.
set -euo pipefail

usage() {
    cat <<'TEXT'
bed/qtest.sh start DIR [OPTIONS] [NVME-OPTION=VALUE ...]   prints the drive's name: qtest:DIR/qt.sock,DIR/ram
bed/qtest.sh stop DIR                                      stops QEMU; the images are kept

  --size 64M       size of each namespace's image; DIR/disk.img (disk2.img ...) is kept, and reused if it exists
  --ram 256M       guest memory, which is all the memory that the drive can reach; at most 2G
  --lba 512        logical block size
  --ms 0           metadata bytes per block
  --extended       metadata follows each block's data, instead of being in a separate buffer
  --namespaces 1   number of namespaces

Everything with a = goes to QEMU's nvme device: serial=X mdts=5 max_ioqpairs=8 cmb_size_mb=16 legacy-cmb=on
(`qemu-system-x86_64 -device nvme,help` lists them; mqes=63 needs QEMU 9 or later). QEMU=PROGRAM chooses another QEMU.
Example: onehop drive identify -d "$(bed/qtest.sh start /tmp/bed mdts=5)"; bed/qtest.sh stop /tmp/bed
TEXT
}

die() {
    echo "qtest.sh: $*" >&2
    exit 1
}

# The process ID of the QEMU in DIR; fails if there is none. A stale file may name another process.
running() {
    local pid
    pid=$(cat "$1/qemu.pid" 2>/dev/null) || return 1
    tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -qxF "unix:$1/qt.sock,server=on,wait=off" || return 1
    echo "$pid"
}

# Guest memory in /dev/shm is never written to a disk. If that is too small, QEMU would later be killed by a signal.
make_ram() {
    local dir=$1 bytes=$2 room
    rm -f "$dir/ram"
    room=$(df --output=avail -B1 /dev/shm 2>/dev/null | tail -n 1) || room=0
    if [ -w /dev/shm ] && [ "${room:-0}" -gt "$bytes" ]; then
        local shared
        shared=$(mktemp /dev/shm/onehop-qtest-XXXXXX)
        ln -s "$shared" "$dir/ram"
    fi
    truncate -s "$bytes" "$dir/ram"
}

remove_ram() {
    local file
    file=$(readlink "$1/ram" || true)
    case $file in /dev/shm/onehop-qtest-*) rm -f "$file" ;; esac
    rm -f "$1/ram"
}

start() {
    local dir=$1 size=64M ram=256M lba=512 ms=0 mset=0 namespaces=1 nvme=nvme,id=nv0 serial=serial=QTEST0001
    shift
    while [ $# -gt 0 ]; do
        case $1 in
        --size) size=${2:?--size wants a size such as 64M}; shift ;;
        --ram) ram=${2:?--ram wants a size such as 256M}; shift ;;
        --lba) lba=${2:?--lba wants 512 or 4096}; shift ;;
        --ms) ms=${2:?--ms wants a number of bytes}; shift ;;
        --namespaces) namespaces=${2:?--namespaces wants a number}; shift ;;
        --extended) mset=1 ;;
        serial=*) serial=$1 ;;
        -*) die "unknown option $1; see bed/qtest.sh --help" ;;
        *=*) nvme+=,$1 ;;
        *) die "'$1' is neither an option nor NVME-OPTION=VALUE" ;;
        esac
        shift
    done
    local qemu=${QEMU:-qemu-system-x86_64} bytes
    command -v "$qemu" >/dev/null || die "$qemu is not installed (Debian: apt-get install qemu-system-x86)"
    bytes=$(numfmt --from=iec "$ram") || die "--ram wants a size such as 256M"
    [ "$bytes" -le $((2 << 30)) ] || die "--ram: at most 2G"

    mkdir -p "$dir"
    dir=$(cd "$dir" && pwd)
    case $dir in *,*) die "the directory's name must not hold a comma" ;; esac
    if running "$dir" >/dev/null; then
        die "QEMU runs in $dir already; bed/qtest.sh stop $dir"
    fi
    remove_ram "$dir"
    make_ram "$dir" "$bytes"
    rm -f "$dir/qt.sock"

    local args=(-device "$nvme,$serial") n image
    for ((n = 1; n <= namespaces; n++)); do
        image=$dir/disk$([ "$n" = 1 ] || echo "$n").img
        [ -e "$image" ] || truncate -s "$size" "$image"
        args+=(-drive "file=$image,format=raw,if=none,id=ns$n")
        args+=(-device "nvme-ns,bus=nv0,drive=ns$n,nsid=$n,logical_block_size=$lba,physical_block_size=$lba,ms=$ms,mset=$mset")
    done
    # -daemonize returns when the machine is made and the socket listens.
    if ! "$qemu" -machine q35,memory-backend=m0 -m "${bytes}B" -accel tcg -S -nodefaults -display none \
        -object "memory-backend-file,id=m0,size=${bytes}B,share=on,mem-path=$dir/ram" "${args[@]}" \
        -qtest "unix:$dir/qt.sock,server=on,wait=off" -qtest-log none \
        -daemonize -pidfile "$dir/qemu.pid" >/dev/null; then
        remove_ram "$dir"
        rm -f "$dir/qt.sock"
        die "QEMU refused; what it said stands above"
    fi
    echo "qtest:$dir/qt.sock,$dir/ram"
}

stop() {
    local dir pid
    dir=$(cd "$1" 2>/dev/null && pwd) || die "there is no directory $1"
    if pid=$(running "$dir"); then
        kill "$pid" 2>/dev/null || true
        for _ in $(seq 50); do
            running "$dir" >/dev/null || break
            sleep 0.1
        done
        if running "$dir" >/dev/null; then
            kill -9 "$pid" 2>/dev/null || true
        fi
    fi
    remove_ram "$dir"
    rm -f "$dir/qt.sock" "$dir/qemu.pid"
}

case ${1:-} in
start | stop)
    [ -n "${2:-}" ] || { usage >&2; exit 2; }
    "$@"
    ;;
-h | --help) usage ;;
*) usage >&2; exit 2 ;;
esac
