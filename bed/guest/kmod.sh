# Shared by the jobs kmod-*: the module, the drive that it claims and releases, and invariants after each job.

# What an unprivileged user would lack on this machine, in the module's words.
case $BED_IOMMU in
on) missing=nothing ;;
lazy) missing=strict ;;
pass) missing=translation ;;
direct) missing=direct ;;
*) missing="translation alone msi" ;;
esac

# Writes a pattern to the drive with the kernel's driver, then binds it to the module.
kmod_begin() {
    load irqbypass nvme
    within 5 drives_it "$NVME"
    kmod-test fill "$(nvme_of "$NVME")"
    [ -e /sys/module/onehop ] || check "the module loads" insmod "$modules_dir/onehop.ko"
    check "it binds the drive" bind_to "$NVME" onehop
}

# Rebinds the drive to the kernel's driver and checks its contents. $1: verify if the tests wrote to the disk.
kmod_end() {
    bind_to "$NVME" ''
    check "the drive goes back to the kernel's driver" within 5 drives_it "$NVME"
    [ -z "$1" ] || kmod-test verify "$(nvme_of "$NVME")"
    rmmod vramexp 2>/dev/null
    echo 1 >/proc/sys/vm/stat_refresh
    check "all pinned pages are given back" \
        test "$(sed -n 's/nr_foll_pin_acquired //p' /proc/vmstat)" = "$(sed -n 's/nr_foll_pin_released //p' /proc/vmstat)"
    check "the module can be unloaded" rmmod onehop
    # It stops at its first complaint.
    [ ! -e /proc/lockdep_stats ] || check "lockdep was on" grep -q 'debug_locks: *1' /proc/lockdep_stats
}

no_driver() {
    [ -z "$(driver "$1")" ] || echo "$1" >"/sys/bus/pci/devices/$1/driver/unbind"
}
