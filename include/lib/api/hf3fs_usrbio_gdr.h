/* Programs of 3FS find the header by this path too. */
#pragma once
#include "../../hf3fs_usrbio_gdr.h"
