# Shared by the jobs that run Linux's own NVMe driver on simulated drives, which bed/vfio-user serves: PLAIN (512-byte
# blocks), BIG (4096), BAD (unreadable blocks), LOST (a command that never completes), GONE (leaves the bus under load),
# PULL (is removed under load and found again). The first of these jobs loads the driver.

# The controller, and the namespace's block device, of the drive with a serial number.
controller() {
    local at
    for at in /sys/class/nvme/nvme[0-9]*; do
        [ "$(tr -d ' ' <"$at/serial" 2>/dev/null)" != "$1" ] || echo "${at##*/}"
    done
}
block() { echo "/dev/$(controller "$1")n1"; }
is_up() { [ -b "$(block "$1")" ] && [ "$(cat "/sys/class/nvme/$(controller "$1")/state")" = live ]; }
is_away() { [ -z "$(controller "$1")" ]; }
function_of() { basename "$(readlink -f "/sys/class/nvme/$1/device")"; }
said() { dmesg | grep -q "$1"; }

# fio SERIAL NAME OPTION...: direct I/O in four threads, 64 commands deep each. If the drive is gone, fio must not
# create a file of its name, which would keep the drive's own from coming back.
load_fio() {
    local serial=$1
    shift
    fio --filename="$(block "$serial")" --allow_file_create=0 --direct=1 --ioengine=libaio --iodepth=64 --numjobs=4 \
        --thread --group_reporting --minimal "$@" 2>/dev/null
}
# Writes 4 MiB per thread at random, in all sizes from a block to 64 KiB, and reads it back.
verified() {
    load_fio "$1" --name=verify --rw=randwrite --bsrange="$2-64k" --size=4m --offset_increment=4m --verify=crc32c \
        --verify_fatal=1
}

PATH=/sbin:/bin
mkdir -p /dev/shm /mnt
ln -sf /proc/mounts /etc/mtab
# Short time-outs, to observe the driver's recovery from a lost command.
[ -e /sys/module/nvme ] || grep '^nvme ' /modules/order | while read -r _ file; do
    case $file in
    nvme-core.ko) insmod "/modules/$file" io_timeout=4 admin_timeout=8 ;;
    *) insmod "/modules/$file" ;;
    esac
done
