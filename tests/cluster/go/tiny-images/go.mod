module eagle3.testbed/tiny-images

go 1.26.0
