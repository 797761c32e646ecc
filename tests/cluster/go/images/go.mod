module eagle3.testbed/images

go 1.26.0
